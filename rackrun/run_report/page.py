"""report.html: a run, or several beside one another, as one file that needs no network."""

from __future__ import annotations

import itertools
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from rackrun.atomic import write_whole
from rackrun.contract import variables
from rackrun.run_files import RunHost
from rackrun.run_folder import RunFolder
from rackrun.run_history import HostUsage
from rackrun.run_report.chart import COLORS, Series, chart
from rackrun.run_report.folder import Story, mean_speed, read, smoothed, values
from rackrun.run_report.template import percent, rendered, shown
from rackrun.runs import how_to_continue
from rackrun.units import data_size, duration, form, plural

FACTS = (
    *("device", "precision", "workers", "world_size", "parameters"),
    *("torch", "torchvision", "cuda", "driver", "python", "git_commit"),
)
"""The fields of `resolved` in config.json that describe where a run was."""
LEARNED = ("loss", "accuracy")
"""Curves that mean nothing where the images were noise (--synthetic)."""
OWN_VARIABLES = (variables.PREFIX, "MASTER_")

Use = tuple[float | None, Callable[[float], str]]
"""What a host has used of something, None where that is not known, and how it is written."""


def write(folder: Path, out: Path | None = None, reload_seconds: int = 0) -> Path:
    """Draw the page of a run, into its folder by default, and return its path.

    A browser loads it again after `reload_seconds`, if they are not 0. Raises DataError for a
    damaged file of the run.
    """
    page, run = out or RunFolder(folder).report, read(folder)
    batch, predictions = run.first_batch, run.predictions
    content = {
        "run": run,
        "reload_seconds": reload_seconds,
        "resume": resume_command(run, folder),
        "headlines": list(headlines(run)),
        "charts": list(charts([run])),
        "first_batch": list(zip(batch.images, batch.captions, strict=True)) if batch else [],
        "by_class": predictions.by_class() if predictions else [],
        "confusions": predictions.confusions() if predictions else [],
        "shares": shares_over_time(run) if run.shares else None,
        "hosts": list(hosts(run)),
        "usage": list(_usage_charts(run.usage)),
        "facts": list(facts(run)),
    }
    write_whole(page, rendered("run.html", content).encode())
    return page


def write_comparison(folders: Sequence[Path], page: Path) -> Path:
    """Draw one page that compares runs, and return its path; DataError for a damaged file."""
    write_whole(page, rendered("compare.html", comparison(list(map(read, folders)))).encode())
    return page


def comparison(runs: Sequence[Story]) -> dict[str, Any]:
    """Return what the template of a comparison shows: runs by accuracy, the best first; curves."""
    # A run without an accuracy, such as one on noise, comes last.
    ordered = sorted(
        runs, key=lambda run: -1.0 if run.accuracy is None else run.accuracy, reverse=True
    )
    highest = ordered[0].accuracy
    names = sorted({name for run in ordered for name in run.settings})
    settings = {name: [shown(run.settings.get(name)) for run in ordered] for name in names}
    recorded = [bool(run.settings) for run in ordered]  # not of a command of the user's own
    differing = {
        name: cells
        for name, cells in settings.items()
        if len(set(itertools.compress(cells, recorded))) > 1
    }
    comparable = len({_judged_on(run) for run in ordered if run.accuracy is not None}) == 1
    rows = list(map(_compared, ordered))
    return {
        "runs": ordered,
        "best": [comparable and run.accuracy == highest for run in ordered],
        "comparable": comparable or highest is None,
        "columns": [name for name in rows[0] if any(row[name] for row in rows)],
        "rows": rows,
        "settings": differing,
        "charts": list(charts(ordered)),
        "same": plural(len(settings) - len(differing), "setting"),
    }


def _judged_on(run: Story) -> tuple[str, ...]:
    """Return what decides which images accuracy is measured on: those of the folder of --data.

    Which of its training images are used, or which other folders, makes no difference.
    """
    versions, settings = run.settings.get("data_versions"), run.settings
    first = next(iter(versions.values()), "") if isinstance(versions, dict) else ""
    data = first or settings.get("data_sha256")
    return tuple(map(shown, (data, settings.get("eval_split"), settings.get("task"))))


def _compared(run: Story) -> dict[str, str]:
    best, last = run.best, run.validation[-1] if run.best else None
    return {
        "best accuracy": "" if run.accuracy is None else percent(run.accuracy),
        "after epoch": f"{best['epoch']:g}" if best else "",
        "last accuracy": percent(last["top1"]) if last else "",
        "last loss": f"{last['loss']:.3f}" if last else "",
        "epochs": f"{run.train[-1]['epoch']:g}" if run.train else "",
        "images/s": "" if run.speed is None else f"{run.speed:,.0f}",
        "time": duration(run.seconds) if run.seconds else "",
        "end": run.end.verdict or "not ended",
    }


def headlines(run: Story) -> Iterator[tuple[str, str]]:
    """Yield the numbers to remember, and what each of them is."""
    over_parts = f"over {len(run.parts)} parts" if len(run.parts) > 1 else ""
    if best := run.best:
        last = run.validation[-1]
        yield percent(last["top1"]), f"of {last['samples']:,} {run.judged_by} images correct"
        if best["top1"] > last["top1"]:
            yield percent(best["top1"]), f"at best, after epoch {best['epoch']:g}"
        yield f"{last['loss']:.3f}", f"{run.judged_by} loss"
    if run.train:
        yield f"{mean_speed(run.train):,.0f}", f"images/s {over_parts}".rstrip()
        epoch, step = run.train[-1]["epoch"], run.train[-1]["step"]
        yield f"{epoch:g}", f"{form(epoch, 'epoch')}, {plural(step, 'step')}"
    if run.seconds:
        yield duration(run.seconds), over_parts or "from start to end"


def facts(run: Story) -> Iterator[tuple[str, object]]:
    """Yield where and how the run was made."""
    plan = run.plan
    if plan.run_id:
        yield "run", plan.run_id
        yield "ranks", f"{plan.world_size} on {plural(len(plan.hosts), 'host')}"
    if models := dict.fromkeys(host.gpu_model for host in plan.hosts if host.gpu_model):
        yield "GPUs", list(models)
    if plan.hosts:
        yield "command", shlex.join(plan.hosts[0].command)
        names = [name for name, _ in plan.hosts[0].environment]
        if given := [name for name in names if not name.startswith(OWN_VARIABLES)]:
            yield "environment variables", given  # values may be private
    resolved = run.config.get("resolved")
    for name in FACTS:
        if value := resolved.get(name) if isinstance(resolved, dict) else None:
            yield name.replace("_", " "), value
    if moments := [line["time"] for line in (*run.train, *run.validation) if "time" in line]:
        first, last = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
            for seconds in (min(moments), max(moments))
        )
        yield "first and last step", f"{first} to {last}"
    if run.end.exit_code is not None:
        yield "exit code", run.end.exit_code


def resume_command(run: Story, folder: Path) -> str:
    """Return what continues a run that has not reached its end; nothing where it cannot.

    No content of a file is in it: a user is going to run it.
    """
    is_continuable = run.end.resume and run.end.verdict not in ("", "done")
    return how_to_continue(RunFolder(folder.absolute())) if is_continuable else ""


def charts(runs: Sequence[Story]) -> Iterator[tuple[str, Markup]]:
    """Yield the curves of training, of one run or of several."""
    for title, of_train, of_validation, write_value in (
        ("loss", "loss", "loss", plain),
        ("accuracy", "accuracy", "top1", percent),
        ("images/s", "images_per_second", "", plain),
        ("learning rate", "rate", "", plain),
    ):
        curves = [
            curve
            for number, run in enumerate(runs)
            if title not in LEARNED or not run.config.get("synthetic")
            for curve in _curves(run, number, len(runs) > 1, of_train, of_validation)
        ]
        if any(len(curve.x) for curve in curves):
            yield title, chart(curves, write_value)


def _curves(
    run: Story, number: int, several: bool, of_train: str, of_validation: str
) -> Iterator[Series]:
    name = f"{run.name}: " if several else ""
    x, y = values(run.train, "epoch"), values(run.train, of_train)
    if len(x) > 1 and of_train != "rate":
        if not several:  # the points themselves, faint behind their course
            yield Series(f"{name}training", x, y, number, faint=True)
        y = smoothed(y)
    is_judged = of_validation and run.validation
    if not (several and is_judged):
        yield Series(f"{name}training", x, y, number)
    if is_judged:
        x, y = values(run.validation, "epoch"), values(run.validation, of_validation)
        yield Series(f"{name}{run.judged_by}", x, y, number if several else 1, dots=True)


class Shares(NamedTuple):
    """A drawing of the images of a step by rank, or by host where ranks are many; its legend."""

    drawing: Markup
    labels: list[str]


def shares_over_time(run: Story) -> Shares:
    """Return the images of a step by rank, in a run that divides them by speed."""
    lines = run.shares
    hosts = [host.name for host in run.plan.hosts for _ in range(host.processes)]
    ranks = sorted({rank for line in lines for rank in line["images"]})
    names = {rank: hosts[rank] if rank < len(hosts) else "" for rank in ranks}
    if len(ranks) <= COLORS or not any(names.values()):
        names = {rank: f"rank {rank}{name and f' on {name}'}" for rank, name in names.items()}
    begins = [(line["time"] - run.begun) / 60 for line in lines]
    last = max(run.end.seconds / 60, begins[-1])
    minutes = np.array([at for pair in itertools.pairwise([*begins, last]) for at in pair])
    labels = list(dict.fromkeys(names.values()))
    curves = []
    for number, label in enumerate(labels):
        members = [rank for rank, name in names.items() if name == label]
        sums = [float(sum(line["images"].get(rank, 0) for rank in members)) for line in lines]
        curves.append(Series(label, minutes, np.repeat(sums, 2), number))
    highest = max(float(curve.y.max()) for curve in curves)
    drawing = chart(curves, lambda count: f"{count:g}", "minutes", (0.0, 1.05 * highest))
    return Shares(drawing, labels if len(labels) <= COLORS else [])


def _usage_charts(usage: Sequence[HostUsage]) -> Iterator[tuple[str, Markup]]:
    by_host = sorted(_by_host(usage).items())
    begun = min((line.time for line in usage), default=0.0)
    minutes = [np.array([(line.time - begun) / 60 for line in lines]) for _, lines in by_host]

    def drawn(
        read_value: Callable[[HostUsage], float | None],
        write_value: Callable[[float], str],
        y_range: tuple[float, float] | None = None,
    ) -> Markup | None:
        curves = []
        for number, (host, lines) in enumerate(by_host):
            y = np.array([read_value(line) for line in lines], dtype=np.float64)  # None is NaN
            curves.append(Series(host, minutes[number], y, number))
        is_used = any(np.nanmax(curve.y, initial=0.0) > 0 for curve in curves)
        return chart(curves, write_value, "minutes", y_range) if is_used else None

    for title, drawing in (
        ("GPU", drawn(lambda line: line.gpu, percent, (0.0, 1.0))),
        ("CPU", drawn(lambda line: line.cpu, percent, (0.0, 1.0))),
        (
            "memory",
            drawn(lambda line: line.memory / max(1, line.memory_total), percent, (0.0, 1.0)),
        ),
        ("received per second", drawn(lambda line: line.received, data_size)),
        ("sent per second", drawn(lambda line: line.sent, data_size)),
    ):
        if drawing:
            yield title, drawing


def _by_host(usage: Sequence[HostUsage]) -> Mapping[str, list[HostUsage]]:
    by_host: dict[str, list[HostUsage]] = defaultdict(list)
    for line in usage:
        by_host[line.host].append(line)
    return by_host


def hosts(run: Story) -> Iterator[tuple[RunHost, list[Use]]]:
    """Yield each host and what it has used: GPUs and CPU on average, memory at most, network."""
    by_host = _by_host(run.usage)
    for host in run.plan.hosts:
        lines = by_host.get(host.name, [])
        busy = [line.gpu for line in lines if line.gpu is not None]
        yield (
            host,
            [
                (_mean(busy), percent),
                (_mean([line.cpu for line in lines]), percent),
                (max((line.memory for line in lines), default=None), data_size),
                (_mean([line.received for line in lines]), data_size),
            ],
        )


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def plain(value: float) -> str:
    """Return a number in as few digits as needed."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
