"""Shows a record as its run was shown at the time: every line once, in order, then live.

The screens are those of an attached run. Their clock is the record's while there is something to
catch up with, and ours afterwards; so equal lines fold, and lines mix, as they would have at the
time. A slow reader is waited for: unlike a launcher, it holds up no run.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from rackrun.launcher.lifecycle.session import OpenScreen
from rackrun.launcher.output.console import Display, PlainOutput
from rackrun.launcher.run.events import Event, Output
from rackrun.launcher.run.job import Command, Job
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.state import RunState
from rackrun.launcher.viewer.entries import (
    AttemptRecord,
    Began,
    Ended,
    Ending,
    Entry,
    Finished,
    Noted,
    Turn,
    Wrote,
    result_of,
)
from rackrun.run_folder import RunFolder
from rackrun.terminal import clean

DELAY_SECONDS = 1.0  # of the clock shown, so that no entry is ever from the future
BOARD_SECONDS = 0.25


class Replay:
    """Viewer of a run, from its first line on."""

    def __init__(self, screens: OpenScreen, plain: bool) -> None:
        """Show nothing before the first entry."""
        self.screens = screens
        self.plain = plain
        self.stack = ExitStack()
        self.attempt: AttemptRecord | None = None
        self.screen: Display | None = None
        self.run: RunState | None = None
        self.began = self.now = self.drawn_at = 0.0
        self.result: Result | None = None
        self.code: int | None = None
        """The exit code, once the run has come to its end."""

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *reason: object) -> None:
        self.stack.close()

    def take(self, entry: Entry, data: bytes) -> None:
        """Show one entry; `data` are the bytes of an output."""
        match entry:
            case Began():
                self.begin(entry.attempt, time.time() - entry.attempt.at)
            case Turn():
                self.now = max(self.now, self.began + entry.turn)
                self.draw()
            case Ended():
                self.code = entry.end
            case _ if self.run is None or self.screen is None:
                return
            case Wrote():
                node, rank, stream, _ = entry.output
                self.screen.show(Output(node, rank, stream, data))
            case Noted():
                self.screen.note(clean(entry.note))
            case Finished():
                self.finish(entry.finish)
            case _ if isinstance(entry, Event):
                self.run.take(entry, self.now)
                self.screen.show(entry)

    def begin(self, attempt: AttemptRecord, age_seconds: float) -> None:
        """Begin an attempt that started `age_seconds` ago."""
        self.stack.close()
        self.attempt = attempt
        self.began = self.now = clock() - age_seconds
        plan, folder = attempt.plan, RunFolder(Path(attempt.folder))
        job = Job(Command((clean(attempt.name),)), folder, plan.run_id)
        self.run = RunState(plan, self.now)
        self.screen = self.stack.enter_context(self.screens(job, plan, self.plain))

    def wait(self) -> None:
        """Advance the clock while no entry comes."""
        self.now = max(self.now, clock())
        self.draw()

    def draw(self) -> None:
        """Show what has come; a dashboard only as often as the eye can follow."""
        if self.run is None or self.screen is None:
            return
        if isinstance(self.screen, PlainOutput):
            self.screen.draw(self.run, self.now)
            while self.screen.out.waiting and not self.screen.out.closed:
                self.screen.out.flush_within(1.0)
        elif time.monotonic() - self.drawn_at > BOARD_SECONDS:
            self.screen.draw(self.run, self.now)
            self.drawn_at = time.monotonic()

    @property
    def closed(self) -> bool:
        """Return True once the reader has gone."""
        return self.screen is not None and self.screen.closed

    def finish(self, ending: Ending) -> None:
        """Print how an attempt ended."""
        assert self.screen is not None and self.attempt is not None
        self.stack.close()
        self.result = result_of(ending, Path(self.attempt.folder))
        self.screen.finish(self.result)


def clock() -> float:
    """Return the time, a little late."""
    return time.monotonic() - DELAY_SECONDS
