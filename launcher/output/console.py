"""Plain output: lines of the ranks on standard output, the launcher's on standard error."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol

from rackrun.commands import called
from rackrun.contract import phases
from rackrun.contract.tasks import TASKS
from rackrun.launcher.output.merge import Line, LogMerger, LogSource, Shown
from rackrun.launcher.output.nonblocking import STALL_SECONDS, NonBlockingWriter
from rackrun.launcher.output.run_view import BUSY, machines
from rackrun.launcher.run.events import Event, Output, RankEnded
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.state import RankState, RunState
from rackrun.runs import SHORT_ID
from rackrun.terminal import clean, clean_lines, discard, one_line
from rackrun.units import duration, plural

PROGRESS_SECONDS = 15.0  # between two lines of progress


def say(text: str) -> None:
    """Print a line of our own outside any display; the reader may have left."""
    try:
        sys.stderr.write(f"rackrun: {clean_lines(text)}\n")
    except OSError:  # a broken pipe, a terminal that has hung up
        discard(sys.stderr)


class Display(Protocol):
    """Display of a run: plain lines here, and others in `dashboard` and `record`."""

    @property
    def closed(self) -> bool:
        """Return True once the reader has gone."""

    def show(self, event: Event) -> None:
        """Take what is to be seen of an event."""

    def note(self, text: str) -> None:
        """Print a line of the launcher's own."""

    def draw(self, run: RunState, now: float) -> None:
        """Show what has come since the last time."""

    def finish(self, result: Result) -> None:
        """Print the summary, and one last line."""


class MergedOutput:
    """Standard output with the merged output of all ranks, for plain lines and the dashboard."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.out = NonBlockingWriter(1)
        self.merger = LogMerger(fold=plan.world_size > 1)

    @property
    def closed(self) -> bool:
        """Return True once the reader of standard output has gone."""
        return self.out.closed

    def show(self, event: Event) -> None:
        """Take output; the traceback of a rank that failed is left for the end."""
        if isinstance(event, Output) and event.rank is not None:
            self.merger.feed(event)
        elif isinstance(event, RankEnded) and event.exit_code:
            self.merger.forget(event.rank)


class PlainOutput(MergedOutput, AbstractContextManager["PlainOutput"]):
    """Lines for a file, a pipe, or a terminal that can do no more."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.stderr = NonBlockingWriter(2)
        self.progress_at = time.monotonic()

    def __exit__(self, *reason: object) -> None:
        self.out.flush()

    def note(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self.stderr.write(f"rackrun: {clean_lines(text)}\n")
        self.stderr.flush()

    def draw(self, run: RunState, now: float) -> None:
        """Print new lines, and now and then one of progress."""
        self._write(self.merger.take(now))
        if now - self.progress_at > PROGRESS_SECONDS:
            self.progress_at = now
            parts = list(progress_words(run.lead, now))
            if parts:
                self.note(f"{time_of_day(now)} {', '.join(parts)}")

    def finish(self, result: Result) -> None:
        """Write what is left, the traceback, the results, and one last line."""
        self.let_out()
        # of a run that is done, even a slow reader gets every line; a failure is shown at once
        self.out.flush_within(float("inf") if result.verdict == "done" else STALL_SECONDS)
        if self.out.dropped and not self.out.closed:
            dropped = plural(self.out.dropped, "line")
            self.note(f"{dropped} came too fast for the reader; the logs have all")
        if result.traceback:
            lines = result.traceback.splitlines()
            self.stderr.write("".join(f"{clean(line)}\n" for line in lines))
        for name, value in (*summary(result), *next_commands(result, self.plan)):
            self.note(f"{name}: {value}")
        self.note(last_line(result))
        self.stderr.flush_within(STALL_SECONDS)

    def let_out(self) -> None:
        """Print what still waits for its equals, or for the end of its line."""
        self._write(self.merger.take(time.monotonic(), everything=True))

    def _write(self, shown: Iterable[Shown]) -> None:
        for item in shown:
            who = line_prefix(self.plan, item.sources)
            start = f"{who} | " if who else ""
            if isinstance(item, Line):
                self.out.write(f"{start}{item.text}\n")
            elif item.clean:
                self.out.write_bytes(_with_prefix(item.data, start.encode()))
            else:
                self.out.write("".join(f"{start}{line}\n" for line in item.lines()))
        self.out.flush()


def _with_prefix(lines: bytes, start: bytes) -> bytes:
    # whole lines; without a prefix the same bytes, and no copy of a flood
    return start + lines[:-1].replace(b"\n", b"\n" + start) + b"\n" if start else lines


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


def ranges(numbers: list[int]) -> str:
    """Return rising numbers in short: 0-3,7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def time_of_day(now: float) -> str:
    """Return the time of day at a moment of the monotonic clock, also one that is replayed."""
    moment = time.time() - time.monotonic() + now
    return time.strftime("%H:%M:%S", time.localtime(moment))


def progress_words(rank: RankState, now: float) -> Iterator[str]:
    """Yield the progress of the run in words, from one rank's report."""
    fields = rank.fields
    if rank.phase != phases.TRAIN and rank.phase in BUSY:
        yield BUSY[rank.phase]
    for name, total in (("epoch", "epochs"), ("step", "steps")):
        if name in fields:
            yield f"{name} {fields[name]}" + (f"/{fields[total]}" if total in fields else "")
    for name, text in (("loss", "loss {:.4g}"), ("accuracy", "accuracy {:.1%}")):
        value = fields.get(name)
        if isinstance(value, int | float):
            yield text.format(value)
    speed = fields.get("images_per_second")
    if isinstance(speed, int | float):
        yield f"{speed:,.0f} images/s"
    if isinstance(share := fields.get("data_share"), int | float):
        yield f"{share:.0%} waiting for data"
    left = rank.seconds_left(now)
    if left is not None:
        yield f"run ends in {duration(left)}"


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
        yield "training accuracy" if is_training else "accuracy", f"{accuracy:.1%}"
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
        yield "to continue, type", result.resume
    model = result.folder / one_line(str(result.report.get("final", "")))
    with suppress(OSError):  # a rank may report any path
        if plan.task and model.is_file():
            args = [short_path(model), "IMAGE"]
            if plan.task not in TASKS:
                args += ["--task", plan.task]  # code of the user: no weights file decides it
            if plan.own_model:
                args += ["--model", plan.own_model]
            yield "to use the model, type", f"{called('predict')} {shlex.join(args)}"


def last_line(result: Result) -> str:
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
