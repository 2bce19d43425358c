"""What a run prints and shows: written into its folder, where viewers read it.

    output.log    the lines of ranks, merged, and the launcher's own, as a terminal prints them
    state.json    the run at this moment, replaced once a second
    events.jsonl  what happened, see `event_log`
    usage.jsonl   how busy every host is, over time

The terminal, `attach` and `status` only read these, so nobody who looks can hold up a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from rackrun.atomic import append_whole
from rackrun.launcher.output.console import (
    NOTE,
    last_line,
    line_prefix,
    next_commands,
    summary,
)
from rackrun.launcher.output.event_log import EventLog
from rackrun.launcher.output.log_files import LogFiles, write_run_page
from rackrun.launcher.output.merge import Line, LogMerger
from rackrun.launcher.output.on_event import EventCommand
from rackrun.launcher.output.run_view import view
from rackrun.launcher.output.usage_log import UsageLog
from rackrun.launcher.run.events import Event, Output, RankEnded, Usage
from rackrun.launcher.run.job import Job
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.state import RunState
from rackrun.signals import ended_by_a_signal
from rackrun.terminal import clean_lines

STATE_SECONDS = 1.0
STATE_SHARE = 20  # at most this fraction (1/20) of the launcher's time


class Reader(Protocol):
    """The reader of a run's output while it is written."""

    @property
    def closed(self) -> bool:
        """Return True once the reader has gone, and wants no more of the run."""

    def finish(self, patiently: bool) -> None:
        """Wait until all is read; unless patiently, only while the reader makes progress."""


StartReader: TypeAlias = Callable[[Job], Reader]
"""Starts a reader of a run, from its first line on; `RunOutput.begin` calls it, once."""


class RunOutput(AbstractContextManager["RunOutput"]):
    """The output of a run through all its attempts; its context ends once all is read."""

    def __init__(self, job: Job, start_reader: StartReader) -> None:
        """Create the files; `start_reader` is called once there is a plan."""
        self.folder = job.folder
        self.events = EventLog(job.folder.events)
        self._usage = UsageLog(job.folder.usage)
        # of the nodes of a scheduler's job, the first one tells of events
        on_event = () if job.folder.node else job.options.on_event_args
        self.event_command = EventCommand(on_event, job.folder.path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(job.folder.output, flags, 0o600)
        self._start_reader = start_reader
        self._reader: Reader | None = None
        self._is_done = False
        self._refused = False
        """The disk takes no more: lines go straight to the terminal."""

    def __exit__(self, *reason: object) -> None:
        if self._reader is not None:
            self._reader.finish(patiently=self._is_done)
        os.close(self._file)
        self.events.close()

    @property
    def closed(self) -> bool:
        """Return True once the reader of the output has gone."""
        return self._reader is not None and self._reader.closed

    def begin(self, job: Job, plan: Plan) -> None:
        """Begin an attempt: write its plan; raises SaveError where that cannot be."""
        self.logs = LogFiles(job.folder, plan)
        self.plan, self._name = plan, job.work.name
        self._merger = LogMerger(fold=plan.world_size > 1)
        self._usage.begin(plan)
        self._state_at = 0.0
        self.events.begin(job.folder.attempt, plan)
        if self._reader is None:
            self._reader = self._start_reader(job)

    def take(self, event: Event) -> None:
        """Take an event; the traceback of a rank that failed is left for the end."""
        if isinstance(event, Output):
            self.logs.record(event)
            if event.rank is not None:
                self._merger.feed(event)
            return
        if isinstance(event, RankEnded) and event.exit_code:
            self._merger.forget(event.rank)
        elif isinstance(event, Usage):
            self._usage.add(event, time.time())
        self.events.add(event)

    def write_logs(self) -> None:
        """Append to the logs of ranks what has come: they explain how ranks have ended."""
        self.note(self.logs.write())
        self._note_problems()

    def note(self, text: str) -> None:
        """Write a line of the launcher's own, if there is one."""
        if text:
            self._write("".join(f"{NOTE}{line}\n" for line in clean_lines(text).split("\n")))

    def draw(self, run: RunState, now: float) -> None:
        """Write what has come since the last time."""
        self._write_lines(self._merger.take(now))
        if now >= self._state_at:
            began = time.perf_counter()
            state = view(run, self._name, self.folder, now, self._merger.last)
            _replace(self.folder.state, msgspec.json.encode(state))
            taken = time.perf_counter() - began  # 0.1 s for 1,000 hosts
            self._state_at = now + max(STATE_SECONDS, STATE_SHARE * taken)

    def end_attempt(self) -> None:
        """Write what waits; nothing is live any more."""
        self._write_lines(self._merger.take(time.monotonic(), everything=True))
        with suppress(OSError):
            self.folder.state.unlink(missing_ok=True)

    def note_result(self, result: Result, is_last: bool = True) -> None:
        """Write how an attempt has ended: the traceback, the results, and one last line.

        Of the last attempt, also what to type next. Under a scheduler, only the node of the first
        rank knows the results, and prints them.
        """
        if result.traceback:
            self.note(result.traceback.rstrip())
        if self.plan.has_first_rank:
            following = next_commands(result, self.plan) if is_last else ()
            for name, value in (*summary(result), *following):
                self.note(f"{name}: {value}")
        self.note(last_line(result if is_last else replace(result, advice="")))
        self.events.write("finish", verdict=result.verdict, exit_code=result.exit_code)

    def end(self, result: Result) -> None:
        """Draw the page of a run whose result is written, and write its end.

        Waits for the command of --on-event, and reports what fails with it.
        """
        self.note(write_run_page(result.folder, self.plan.task))
        self.event_command.send("end", last_line(result), result.host, result.rank, result)
        try:
            with ended_by_a_signal():
                self.event_command.wait(self.note)
        except KeyboardInterrupt:
            self.event_command.abandon()
            self.note("--on-event: not waiting for the command")
        self._note_problems()
        self._is_done = result.verdict == "done"
        self.events.write("end", exit_code=result.exit_code)

    def _note_problems(self) -> None:
        for problem in self.event_command.problems():
            self.note(problem)

    def _write_lines(self, lines: list[Line]) -> None:
        for line in lines:
            who = line_prefix(self.plan, line.sources)
            start = f"{who} | " if who else ""
            text = line.text.replace("\n", f"\n{start}") if start else line.text
            self._write(f"{start}{text}\n")

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        self._refused = self._refused or not append_whole(self._file, data)
        if not self._refused:
            return
        with suppress(OSError):
            os.write(2 if text.startswith(NOTE) else 1, data)


def _replace(path: Path, content: bytes) -> None:
    # Without the fsync of `atomic`: written every second, it means nothing after a crash.
    partial = path.with_name(f".{path.name}.partial")
    with suppress(OSError):  # a full disk does not end the run
        partial.write_bytes(content)
        partial.replace(path)
