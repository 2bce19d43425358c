"""report.html: a run, or several beside one another, as one file that needs no network."""

from __future__ import annotations

import itertools
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from rackrun.atomic import write_whole
from rackrun.commands import called
from rackrun.contract import variables
from rackrun.run_folder import RunFolder
from rackrun.run_history import HostUsage
from rackrun.run_report.chart import COLOURS, Series, chart
from rackrun.run_report.classes import by_class, confusions, matrix
from rackrun.run_report.folder import (
    Line,
    Predictions,
    Story,
    TrainingImages,
    mean_speed,
    read,
    smoothed,
    values,
)
from rackrun.run_report.template import data_url, rendered
from rackrun.terminal import clean_lines, one_line
from rackrun.units import data_size, duration, form, plural

FACTS = (
    *("device", "precision", "workers", "world_size", "parameters"),
    *("torch", "torchvision", "cuda", "driver", "python", "git_commit"),
)
"""The fields of `resolved` in config.json that describe where a run was."""
LEARNED = ("loss", "accuracy")
"""Curves that mean nothing where the images were noise (--synthetic)."""
COMPARED = (
    *("best accuracy", "after epoch", "last accuracy", "last loss", "epochs", "images/s"),
    *("time", "end"),
)
MOST_NAMED = 16
"""Ranks whose images a line of the page lists."""
PRIVATE = ("--env", "--on-event")
"""Options of the launcher whose values may be secrets."""
UsageQuantity = tuple[
    str, Callable[[HostUsage], float | None], Callable[[float], str], tuple[float, float] | None
]
"""Title, what a line has of it, how it is written, the range of y; None: that of its values."""
OWN_VARIABLES = (variables.PREFIX, "MASTER_")


def write(folder: Path, out: Path | None = None, reload_seconds: int = 0) -> Path:
    """Draw the page of a run, into its folder by default, and return its path.

    A browser loads it again after `reload_seconds`, if they are not 0. Raises DataError for a
    damaged file of the run.
    """
    page = out or RunFolder(folder).report
    content = run_page(read(folder), folder)
    write_whole(page, rendered("run.html", **content, reload_seconds=reload_seconds).encode())
    return page


def write_comparison(folders: Sequence[Path], page: Path) -> Path:
    """Draw one page that compares runs, and return its path; DataError for a damaged file."""
    stories = [read(folder) for folder in folders]
    write_whole(page, rendered("compare.html", **comparison(stories)).encode())
    return page


def run_page(story: Story, folder: Path) -> dict[str, Any]:
    """Return what the template of a run shows."""
    return {
        "name": one_line(story.name),
        "verdict": one_line(story.end.verdict or "not ended"),
        "cause": one_line(story.end.cause),
        "advice": one_line(story.end.advice),
        "resume": resume_command(story, folder),
        "traceback": clean_lines(story.end.traceback),
        "parts": list(parts(story)) if len(story.parts) > 1 else [],
        "headlines": list(headlines(story)),
        "facts": list(facts(story)),
        "judged_by": story.judged_by,
        "charts": [(title, drawing) for title, drawing in charts([story])],
        "first_batch": first_batch(story.first_batch) if story.first_batch else [],
        "grid": grid(story.predictions) if story.predictions else [],
        "hardest": grid(story.hardest) if story.hardest else [],
        "classes": by_class(story.predictions) if story.predictions else None,
        "matrix": matrix(story.predictions) if story.predictions else "",
        "confusions": confusions(story.predictions) if story.predictions else [],
        "share_rows": list(share_rows(story)),
        "shares_over_time": shares_over_time(story),
        "hosts": list(hosts(story)),
        "usage": list(_usage_charts(story.usage)),
        "settings": sorted((one_line(key), setting(value)) for key, value in settings_of(story)),
    }


def comparison(stories: Sequence[Story]) -> dict[str, Any]:
    """Return what the template of a comparison shows: runs by accuracy, the best first; curves."""
    # A run without an accuracy, such as one on noise, comes last.
    ordered = sorted(
        stories, key=lambda story: -1.0 if story.accuracy is None else story.accuracy, reverse=True
    )
    highest = ordered[0].accuracy
    settings = [dict(settings_of(story)) for story in ordered]
    names = sorted({name for one in settings for name in one})
    rows = [(name, [setting(one.get(name, "")) for one in settings]) for name in names]
    recorded = [bool(one) for one in settings]  # not of a command of the user's own
    differing = {
        name: cells for name, cells in rows if len(set(itertools.compress(cells, recorded))) > 1
    }
    judged_on = {
        _judged_on(one)
        for story, one in zip(ordered, settings, strict=True)
        if story.accuracy is not None
    }
    comparable = len(judged_on) == 1
    numbers = zip(COMPARED, *map(_compared, ordered), strict=True)
    return {
        "runs": [one_line(story.name) for story in ordered],
        "best": [comparable and story.accuracy == highest for story in ordered],
        "comparable": comparable or highest is None,
        "numbers": [column for column in numbers if any(column[1:])],
        "settings": [(one_line(name), *cells) for name, cells in differing.items()],
        "charts": list(charts(ordered)),
        "same": plural(len(rows) - len(differing), "setting"),
    }


def _judged_on(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what decides which images accuracy is measured on: those of the folder of --data.

    Which of its training images are used, or which other folders, makes no difference.
    """
    versions = settings.get("data_versions")
    first = next(iter(versions.values()), "") if isinstance(versions, dict) else ""
    data = first or settings.get("data_sha256", "")
    return tuple(map(setting, (data, settings.get("eval_split", ""), settings.get("task", ""))))


def _compared(story: Story) -> tuple[str, ...]:
    accuracy, speed = story.accuracy, story.speed
    evaluations = [] if story.config.get("synthetic") else story.validation
    best = max(evaluations, key=lambda line: float(line["top1"]), default=None)
    return (
        "" if accuracy is None else percent(accuracy),
        f"{best['epoch']:g}" if best else "",
        percent(evaluations[-1]["top1"]) if evaluations else "",
        f"{evaluations[-1]['loss']:.3f}" if evaluations else "",
        f"{story.train[-1]['epoch']:g}" if story.train else "",
        "" if speed is None else f"{speed:,.0f}",
        duration(story.seconds) if story.seconds else "",
        one_line(story.end.verdict or "not ended"),
    )


def headlines(story: Story) -> Iterator[tuple[str, str]]:
    """Yield the numbers to remember, and what each of them is."""
    train, validation = story.train, story.validation
    over_parts = f"over {len(story.parts)} parts" if len(story.parts) > 1 else ""
    if validation and not story.config.get("synthetic"):
        last, best = validation[-1], max(validation, key=lambda line: float(line["top1"]))
        yield percent(last["top1"]), f"of {last['samples']:,} {story.judged_by} images correct"
        if best["top1"] > last["top1"]:
            yield percent(best["top1"]), f"at best, after epoch {best['epoch']:g}"
        yield f"{last['loss']:.3f}", f"{story.judged_by} loss"
    if train:
        speed = mean_speed(train)
        yield f"{speed:,.0f}", f"images/s {over_parts}".rstrip()
        epoch, step = train[-1]["epoch"], train[-1]["step"]
        yield f"{epoch:g}", f"{form(epoch, 'epoch')}, {plural(step, 'step')}"
    if story.seconds:
        yield duration(story.seconds), over_parts or "from start to end"


def facts(story: Story) -> Iterator[tuple[str, str]]:
    """Yield where and how the run was made."""
    plan = story.plan
    if plan.run_id:
        yield "run", one_line(plan.run_id)
        yield "ranks", f"{plan.world_size} on {plural(len(plan.hosts), 'host')}"
    if models := dict.fromkeys(host.gpu_model for host in plan.hosts if host.gpu_model):
        yield "GPUs", one_line(", ".join(models))
    if plan.hosts:
        typed = shlex.join(_without_values(story.typed) or plan.hosts[0].command)
        yield "command", one_line(typed)
        names = [name for name, _ in plan.hosts[0].environment]
        if given := [name for name in names if not name.startswith(OWN_VARIABLES)]:
            yield "environment variables", one_line(", ".join(given))  # values may be private
    recorded = story.config.get("resolved")
    resolved = recorded if isinstance(recorded, dict) else {}
    for name in FACTS:
        if resolved.get(name):
            yield name.replace("_", " "), setting(resolved[name])
    if moments := [line["time"] for line in (*story.train, *story.validation) if "time" in line]:
        first, last = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
            for seconds in (min(moments), max(moments))
        )
        yield "first and last step", f"{first} to {last}"
    if story.end.exit_code is not None:
        yield "exit code", str(story.end.exit_code)


def _without_values(typed: Sequence[str]) -> list[str]:
    """Return a command without what may be private: a page is shown to others."""
    args: list[str] = []
    for before, arg in itertools.pairwise(("", *typed)):
        option, equals, value = arg.partition("=") if arg.startswith("--") else (before, "", arg)
        if option in PRIVATE and value:
            name = value.partition("=")[0] + "=" if option == "--env" else ""
            args.append(f"{option}={name}…" if equals else f"{name}…")
        else:
            args.append(arg)
    return args


def resume_command(story: Story, folder: Path) -> str:
    """Return what continues a run that has not reached its end; nothing where it cannot.

    No content of a file is in it: a user is going to run it.
    """
    has_ended_early = story.end.verdict not in ("", "done")
    if not (has_ended_early and story.end.saved and story.typed):
        return ""
    path = folder.absolute()
    run = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{called('rerun')} {shlex.quote(str(run))} --resume {shlex.quote(str(run))}"


def parts(story: Story) -> Iterator[tuple[str, ...]]:
    """Yield a row per part of a run that was resumed: where it began and ended, and how fast."""
    for number, part in enumerate(story.parts, start=1):
        last = part.train[-1]
        is_last = number == len(story.parts)
        seconds = (is_last and story.end.seconds) or part.seconds
        yield (
            str(number),
            f"{part.step + 1:,} to {last['step']:,}",
            f"{part.epoch:g} to {last['epoch']:g}",
            f"{part.speed:,.0f}",
            duration(seconds),
        )


def settings_of(story: Story) -> Iterator[tuple[str, Any]]:
    """Yield the settings of training."""
    return ((name, value) for name, value in story.config.items() if name != "resolved")


def charts(stories: Sequence[Story]) -> Iterator[tuple[str, Markup]]:
    """Yield the curves of training, of one run or of several."""
    for title, of_train, of_validation, write_value in (
        ("loss", "loss", "loss", plain),
        ("accuracy", "accuracy", "top1", percent),
        ("images/s", "images_per_second", "", plain),
        ("learning rate", "rate", "", plain),
    ):
        curves = [
            curve
            for number, story in enumerate(stories)
            if title not in LEARNED or not story.config.get("synthetic")
            for curve in _story_curves(story, number, len(stories), of_train, of_validation)
        ]
        if any(len(curve.x) for curve in curves):
            yield title, chart(curves, write_value)


def _story_curves(
    story: Story, number: int, count: int, of_train: str, of_validation: str
) -> Iterator[Series]:
    several = count > 1
    name = f"{story.name}: " if several else ""
    x, y = values(story.train, "epoch"), values(story.train, of_train)
    if len(x) > 1 and of_train != "rate":
        if not several:  # the points themselves, faint behind their course
            yield Series(f"{name}training", x, y, number, faint=True)
        y = smoothed(y)
    if not (several and of_validation and story.validation):
        yield Series(f"{name}training", x, y, number)
    if of_validation and story.validation:
        x, y = values(story.validation, "epoch"), values(story.validation, of_validation)
        yield Series(f"{name}{story.judged_by}", x, y, number if several else 1, dots=True)


def share_rows(story: Story) -> Iterator[tuple[str, str, str]]:
    """Yield the changes of the ranks' shares of a step: time, step, images by rank.

    None where all shares are even.
    """
    for line in _uneven_shares(story):
        counts = list(line["images"].values())
        shown = ", ".join(map(str, counts[:MOST_NAMED])) + ("…" if len(counts) > MOST_NAMED else "")
        yield duration(line["time"] - story.begun), f"{line['step']:,}", shown


def _uneven_shares(story: Story) -> list[Line]:
    """Return the lines about shares; none where all ranks always had the same."""
    uneven = any(max(ones := line["images"].values()) > min(ones) + 1 for line in story.shares)
    return story.shares if uneven else []


def shares_over_time(story: Story) -> tuple[Markup, list[str]] | None:
    """Return a drawing of the images of a step by rank, by host where ranks are many; its legend.

    None where all ranks always had the same.
    """
    lines = _uneven_shares(story)
    if not lines:
        return None
    hosts = [one_line(host.name) for host in story.plan.hosts for _ in range(host.processes)]
    ranks = sorted({rank for line in lines for rank in line["images"]})
    names = {rank: hosts[rank] if rank < len(hosts) else "" for rank in ranks}
    if len(ranks) <= COLOURS or not any(names.values()):
        names = {rank: f"rank {rank}{name and f' on {name}'}" for rank, name in names.items()}
    begins = [(line["time"] - story.begun) / 60 for line in lines]
    last = max(story.end.seconds / 60, begins[-1])
    minutes = np.array([at for pair in itertools.pairwise([*begins, last]) for at in pair])
    labels = list(dict.fromkeys(names.values()))
    curves = []
    for number, label in enumerate(labels):
        members = [rank for rank, name in names.items() if name == label]
        sums = [float(sum(line["images"].get(rank, 0) for rank in members)) for line in lines]
        curves.append(Series(label, minutes, np.repeat(sums, 2), number))
    highest = max(float(curve.y.max()) for curve in curves)
    drawing = chart(curves, lambda count: f"{count:g}", "minutes", (0.0, 1.05 * highest))
    return drawing, labels if len(labels) <= COLOURS else []


def _usage_charts(usage: Sequence[HostUsage]) -> Iterator[tuple[str, Markup]]:
    by_host = _by_host(usage)
    begun = min((line.time for line in usage), default=0.0)
    quantities: tuple[UsageQuantity, ...] = (
        ("GPU", lambda line: line.gpu, percent, (0.0, 1.0)),
        ("CPU", lambda line: line.cpu, percent, (0.0, 1.0)),
        ("memory", lambda line: line.memory / max(1, line.memory_total), percent, (0.0, 1.0)),
        ("received per second", lambda line: line.received, data_size, None),
        ("sent per second", lambda line: line.sent, data_size, None),
    )
    for title, read_value, write_value, y_range in quantities:
        curves = []
        for number, (host, lines) in enumerate(sorted(by_host.items())):
            values_read = [(line.time, read_value(line)) for line in lines]
            samples = [sample for sample in values_read if sample[1] is not None]
            points = np.array(samples, dtype=np.float64).reshape(-1, 2)
            curves.append(Series(host, (points[:, 0] - begun) / 60, points[:, 1], number))
        if any(np.nanmax(curve.y, initial=0.0) > 0 for curve in curves):
            yield title, chart(curves, write_value, "minutes", y_range)


def _by_host(usage: Sequence[HostUsage]) -> Mapping[str, list[HostUsage]]:
    by_host: dict[str, list[HostUsage]] = defaultdict(list)
    for line in usage:
        by_host[line.host].append(line)
    return by_host


def hosts(story: Story) -> Iterator[dict[str, Any]]:
    """Yield a row per host: how it ended, its ranks, and its mean use."""
    by_host = _by_host(story.usage)
    for host in story.plan.hosts:
        lines = by_host.get(host.name, [])
        busy = [line.gpu for line in lines if line.gpu is not None]
        received = float(np.mean([line.received for line in lines])) if lines else 0.0
        yield {
            "name": one_line(host.name),
            "ranks": str(host.processes),
            "end": one_line(story.end.hosts.get(host.name, "not known")),
            "gpu": percent(np.mean(busy)) if busy else "–",
            "cpu": percent(np.mean([line.cpu for line in lines])) if lines else "–",
            "memory": data_size(max(line.memory for line in lines)) if lines else "–",
            "received": data_size(received) if lines else "–",
        }


def first_batch(shown: TrainingImages) -> list[tuple[str, str]]:
    """Return training images with their classes."""
    return [
        (data_url(image), one_line(caption))
        for image, caption in zip(shown.images, shown.captions, strict=True)
    ]


def grid(predictions: Predictions) -> list[dict[str, Any]]:
    """Return the images with the model's answer to each."""
    return [
        {
            "source": data_url(predictions.images[number]),
            "key": one_line(predictions.keys[number]),
            "right": bool(predictions.labels[number] == predictions.predicted[number]),
            "predicted": _short_class(predictions.classes[int(predictions.predicted[number])]),
            "label": _short_class(predictions.classes[int(predictions.labels[number])]),
            "probability": percent(predictions.probability[number]),
        }
        for number in range(len(predictions.images))
    ]


def _short_class(name: object) -> str:
    return one_line(str(name).split(",")[0])


def setting(value: object) -> str:
    """Return the value of a setting as people read it."""
    if isinstance(value, list):
        return one_line(", ".join(map(str, value)))
    return one_line(str(value))


def percent(value: Any) -> str:
    """Return a share as a percentage."""
    return f"{round(100 * float(value), 1):g}%"


def plain(value: float) -> str:
    """Return a number in as few digits as needed."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
