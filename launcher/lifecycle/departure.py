"""`--detach`: a run that leaves its terminal once every rank has taken its first step."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

from rackrun.commands import called
from rackrun.launcher.lifecycle.starter import Controller, see_and_end
from rackrun.launcher.output.console import last_line, say
from rackrun.launcher.run.events import Event
from rackrun.launcher.run.job import Job
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.state import RunState
from rackrun.runs import SHORT_ID


class Departure(AbstractContextManager["Departure"]):
    """The display of all attempts of a detached run: notes until it leaves, then nothing."""

    closed = False

    def __init__(self, controller: Controller, running_seconds: float | None) -> None:
        """Leave after a step of every rank, or once they have run for so many seconds.

        None: every rank reports its steps; 0: as soon as there is a run.
        """
        self.controller = controller
        self.running_seconds = running_seconds
        self.run = ""
        self.has_begun = False
        self.running_since = float("inf")
        self.is_gone = False

    def __enter__(self) -> Departure:
        """Print the id of the run before its first attempt, whose plan is there now.

        From here on, whatever becomes of the starter ends only its wait.
        """
        if not self.has_begun:
            self.has_begun = True
            self.controller.begin_detached(self.run)
            sys.stdout.write(f"{self.run}\n")
            sys.stdout.flush()
            if self.running_seconds == 0:
                self._leave()
            else:
                seconds = self.running_seconds
                what = "the first step" if seconds is None else f"{seconds:g} s"
                say(f"waiting for {what} of every rank; Ctrl-C leaves the run running")
        return self

    def __exit__(self, *reason: object) -> None:
        self.running_since = float("inf")  # a restart starts the time again

    def open(self, job: Job, plan: Plan, plain: bool) -> Departure:
        """Return the display of an attempt."""
        self.run = plan.run_id[:SHORT_ID]
        return self

    def show(self, event: Event) -> None:
        """Show nothing of the ranks: `attach` does."""

    def note(self, text: str) -> None:
        """Print a line of the launcher's own, as long as somebody waits."""
        if not self.is_gone:
            say(text)

    def draw(self, run: RunState, now: float) -> None:
        """Leave once the run is on its way."""
        if self.is_gone:
            return
        all_run = all(rank.running for rank in run.ranks)
        self.running_since = min(self.running_since, now) if all_run else float("inf")
        seconds = self.running_seconds
        has_run = seconds is not None and now - self.running_since >= seconds
        if has_run or all(rank.step > 0 for rank in run.ranks):
            say(f"detached; {see_and_end(self.run)}")
            self._leave()

    def finish(self, result: Result) -> None:
        """Print how an attempt ended before its first step."""
        if not self.is_gone:
            say(f"run {self.run} has ended: {last_line(result)}")
            say(f"its output: {called('logs')} {self.run}")

    def _leave(self) -> None:
        self.is_gone = True
        self.controller.leave()
