"""The lines of a launcher: what a run prints before its ranks start, about them, and at its end."""

from __future__ import annotations

import os
import select
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rackrun.commands import called
from rackrun.contract import phases
from rackrun.contract.tasks import TASKS
from rackrun.launcher.output.merge import LogSource
from rackrun.launcher.output.run_view import BUSY, RunView, machines
from rackrun.launcher.run.host_names import ranges
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result
from rackrun.run_files import RunEnd
from rackrun.runs import SHORT_ID
from rackrun.terminal import clean_lines, discard, one_line
from rackrun.units import duration, share

NOTE = "rackrun: "
"""Begins every line of the launcher's own."""


def say(text: str) -> None:
    """Print a line of our own outside any display; the reader may have left."""
    try:
        sys.stderr.write(f"{NOTE}{clean_lines(text)}\n")
    except OSError:  # a broken pipe, a terminal that has hung up
        discard(sys.stderr)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it, however long that takes."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:  # another program has made the descriptor non-blocking
            select.select([], [descriptor], [])


def line_prefix(plan: Plan, sources: tuple[LogSource, ...]) -> str:
    """Return the prefix of a line: host and rank, with a count for several; empty for one rank."""
    if plan.world_size == 1 == len(plan.hosts):
        return ""
    ranks = sorted({source.rank for source in sources if source.rank is not None})
    hosts = sorted({source.node for source in sources})
    where = plan.host(hosts[0]).name if len(hosts) == 1 else f"{len(hosts)} hosts"
    start = f"{where}:" if len(plan.hosts) > 1 else ""
    count = f" x{len(ranks)}" if len(ranks) > 1 else ""
    return f"{start}{ranges(ranks)}{count}"


def progress_words(run: RunView) -> Iterator[str]:
    """Yield the progress of the run in words, from what its first rank has reported."""
    if run.phase != phases.TRAIN and run.phase in BUSY:
        yield BUSY[run.phase]
    for name, value, total in (("epoch", run.epoch, run.epochs), ("step", run.step, run.steps)):
        if value:
            yield f"{name} {value}" + (f"/{total}" if total else "")
    yield from measures(run)


def measures(run: RunView) -> Iterator[str]:
    """Yield what the first rank has measured, and last of all the time that is left."""
    if run.loss is not None:
        yield f"loss {run.loss:.4g}"
    if run.images_per_second is not None:
        yield f"{run.images_per_second:,.0f} images/s"
    if run.accuracy is not None:
        yield f"accuracy {share(run.accuracy)}"
    if run.data_share is not None:
        yield f"{run.data_share:.0%} waiting for data"
    if run.seconds_left is not None:
        yield f"run ends in {duration(run.seconds_left)}"


def start_line(plan: Plan, versions: str, folder: Path) -> str:
    """Return what runs where, as the first line of a run whose ranks do not print it themselves."""
    what = ", ".join(filter(None, (machines(plan), one_line(versions))))
    return f"{what}; run {plan.run_id[:SHORT_ID]}, {short_path(folder)}"


def summary(result: Result) -> Iterator[tuple[str, str]]:
    """Yield the results of a run: name and value."""
    accuracy, speed = result.report.get("accuracy"), result.report.get("images_per_second")
    if result.verdict == "done" and isinstance(accuracy, int | float):
        # A task without a validation split reports no best evaluation.
        is_training = "final" in result.report and "best" not in result.report
        yield "training accuracy" if is_training else "accuracy", share(accuracy)
    if result.verdict == "done" and isinstance(speed, int | float):
        yield "speed", f"{speed:,.0f} images/s"
    for name, field in (("model", "final"), ("report", "report")):
        path = result.report.get(field)
        if isinstance(path, str):
            yield name, short_path(result.folder / one_line(path))
    yield "run", short_path(result.folder)
    left_clean = sum(state == "clean" for state in result.hosts.values())
    if result.verdict != "done" and len(result.hosts) > 1:
        nothing_left = ": nothing left running" if left_clean == len(result.hosts) else ""
        yield "hosts", f"{left_clean} of {len(result.hosts)} clean{nothing_left}"
    for host, state in result.hosts.items():
        if state != "clean":
            yield host, one_line(state)


def next_commands(result: Result, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what to type next, and what it is for: a task is continued, or its model is used."""
    if result.resume:
        by_scheduler = plan.hosts[0].signalled_together
        how = "start on every node" if by_scheduler else "type"
        yield f"to continue, {how}", result.resume
    model = result.folder / one_line(str(result.report.get("final", "")))
    with suppress(OSError):  # a rank may report any path
        if plan.task and model.is_file():
            args = [short_path(model), "IMAGE"]
            if plan.task not in TASKS:
                args += ["--task", plan.task]  # code of the user: no weights file decides it
            if plan.own_model:
                args += ["--model", plan.own_model]
            yield "to use the model, type", f"{called('predict')} {shlex.join(args)}"


def last_line(result: Result | RunEnd) -> str:
    """Return the line about the end: cause, host, rank, log, what to do."""
    if result.verdict == "done":
        return f"done in {duration(result.seconds)}"
    blamed = ""
    if result.host is not None:
        rank = "" if result.rank is None else f"rank {result.rank} on "
        blamed = f"{rank}{result.host}: "
    parts = [f"{result.verdict}: {blamed}{one_line(result.cause)}"]
    if result.log is not None:
        parts.append(f"log: {short_path(result.log)}")
    if result.advice:
        parts.append(result.advice)
    return "; ".join(parts)


def short_path(path: Path) -> str:
    """Return a path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
