"""The lines that rank 0 prints of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rackrun.machine import core_count
from rackrun.training.config import Config
from rackrun.training.counts import Counts
from rackrun.training.data.loader import worker_count
from rackrun.training.ranks import Ranks
from rackrun.units import duration, plural

WAITS_LONG = 0.2  # of the time for data: worth a line on what to type


def progress_line(fields: Mapping[str, Any], seconds_left: float) -> str:
    """Return the line of an interval; `fields` are those of a report."""
    return _joined(
        f"epoch {fields['epoch']}/{fields['epochs']}",
        f"step {fields['epoch_step']}/{fields['epoch_steps']}",
        f"loss {fields['loss']:.4f}",
        f"accuracy {fields['accuracy']:.1%}" if "accuracy" in fields else "",
        f"{fields['images_per_second']:,.0f} images/s",
        f"{fields['data_share']:.0%} waiting for data" if "data_share" in fields else "",
        f"{duration(seconds_left)} left",
    )


def advice_on_waits(config: Config, ranks: Ranks, share: float) -> str:
    """Return what to type where ranks wait for data for more than a fifth of the time, or ""."""
    if share <= WAITS_LONG:
        return ""
    workers, cores = worker_count(config, ranks), core_count() // ranks.local_world
    if "://" in config.data and not config.cache:
        advice = "--cache FOLDER, which keeps shards on the disk of each host"
    elif workers < cores:
        advice = f"--workers {cores} (now {workers})"
    else:
        advice = "convert shards DATA SMALLER --short-side 256, whose images decode faster"
    return f"ranks wait for data {share:.0%} of the time: type {advice}"


def epoch_line(
    config: Config, epoch: int, trained: Counts, judged: Counts | None, has_top5: bool, skipped: int
) -> str:
    """Return the line of an epoch; `judged` are the counts of its evaluation, if it counts."""
    return _joined(
        f"epoch {epoch}/{config.epochs}",
        *_trained(config, trained),
        *(_judged(config, judged, has_top5) if judged else ()),
        f"{trained.images_per_second:,.0f} images/s" if trained.samples else "",
        f"{plural(trained.skipped_steps, 'step')} skipped (float16 overflow)"
        if trained.skipped_steps
        else "",
        f"{plural(skipped, 'image')} skipped" if skipped else "",
    )


def _trained(config: Config, counts: Counts) -> Iterable[str]:
    if not counts.samples:
        return ["trained before the resume"]  # between the epoch's last step and its evaluation
    accuracy = "" if config.synthetic else f"accuracy {counts.accuracy:.2%}"
    return [f"loss {counts.mean_loss:.4f}", accuracy]


def _judged(config: Config, counts: Counts, has_top5: bool) -> Iterable[str]:
    yield f"{config.judged_by} loss {counts.mean_loss:.4f}"
    yield f"{config.judged_by} accuracy {counts.accuracy:.2%}"
    if has_top5:
        yield f"top 5 {counts.accuracy5:.2%}"


def last_line(config: Config, accuracy: float | None, last_epoch: Counts, total: Counts) -> str:
    """Return what a run came to; `accuracy` is that of its evaluations, if they count."""
    if accuracy is not None:
        first = f"{config.judged_by} accuracy {accuracy:.2%}"
    elif last_epoch.samples and not config.synthetic:
        first = f"training accuracy {last_epoch.accuracy:.2%}"
    else:
        first = ""
    if not total.samples:
        return _joined(first, "no step was left to train")
    speed = f"{total.images_per_second:,.0f} images/s"
    return _joined(first, speed, f"training took {duration(total.seconds)}")


def _joined(*parts: str) -> str:
    return "  ".join(filter(None, parts))
