"""What a launcher writes into the run folder while a run goes on, beside logs and plan.

usage.jsonl   how busy every host is, over time
live.json     what the dashboard shows now, and the curves so far, for `board`
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from launcher.output.console import Display
from launcher.output.run_view import RunView, view
from launcher.output.usage_log import UsageLog
from launcher.run.events import Added, Event, Report, Usage
from launcher.run.job import Job
from launcher.run.plan import Plan
from launcher.run.result import Result
from launcher.run.state import RunState

LIVE_SECONDS = 1.0
LIVE_SHARE = 20  # at most this fraction (1/20) of the launcher's time
MOST_POINTS = 512  # of a curve, before every other one is left out
CURVES = ("step", "loss", "accuracy", "images_per_second")


class JournaledDisplay:
    """A display of which the run folder keeps what a browser wants to know."""

    def __init__(self, job: Job, plan: Plan, shown: Display) -> None:
        self.job = job
        self.shown = shown
        self.first_rank = plan.hosts[0].first_rank
        self.usage = UsageLog(job.folder.usage, {host.node: host.name for host in plan.hosts})
        self.curves = Curves()
        self.live_at = 0.0

    @property
    def closed(self) -> bool:
        """Return True once the reader has gone."""
        return self.shown.closed

    def show(self, event: Event) -> None:
        """Keep what is kept, and show it."""
        if isinstance(event, Added):
            self.usage.hosts[event.node] = event.host.name
        elif isinstance(event, Usage):
            self.usage.add(event, time.time())
        elif isinstance(event, Report) and event.rank == self.first_rank:
            self.curves.add(event.fields)
        self.shown.show(event)

    def note(self, text: str) -> None:
        """Show a line of our own."""
        self.shown.note(text)

    def draw(self, run: RunState, now: float) -> None:
        """Write what is due, and draw."""
        self.first_rank = run.leader
        self.usage.write(now)
        if now >= self.live_at:
            began = time.perf_counter()
            self.write_live(view(run, self.job.work.name, self.job.folder.path, now))
            taken = time.perf_counter() - began  # 0.1 s for 1,000 hosts
            self.live_at = now + max(LIVE_SECONDS, LIVE_SHARE * taken)
        self.shown.draw(run, now)

    def finish(self, result: Result) -> None:
        """Show how it ended."""
        self.shown.finish(result)

    def close(self) -> None:
        """Write what waits; nothing is live any more."""
        self.usage.write(0.0, everything=True)
        with suppress(OSError):
            self.job.folder.live.unlink(missing_ok=True)

    def write_live(self, run: RunView) -> None:
        """Replace live.json; a disk that refuses it does not end the run."""
        path = self.job.folder.live
        partial = path.with_name(f".{path.name}.partial")
        with suppress(OSError):
            partial.write_text(json.dumps(live(run, self.curves)))
            partial.replace(path)


class Curves:
    """What the first rank reported over the steps, in a bounded number of points."""

    def __init__(self) -> None:
        self.points: list[list[float | None]] = []
        self.every = 1
        self.passed = 0

    def add(self, fields: dict[str, Any]) -> None:
        """Take a report, if it has got to another step with a loss."""
        point = [fields.get(name) for name in CURVES]
        if None in point[:2] or (self.points and point[0] == self.points[-1][0]):
            return
        self.passed += 1
        if self.passed % self.every == 0:
            self.points.append(point)
        if len(self.points) > MOST_POINTS:
            self.points = self.points[1::2]
            self.every *= 2


def live(run: RunView, curves: Curves) -> dict[str, Any]:
    """Return what a browser gets."""
    return {**asdict(run), "at": time.time(), "curves": curves.points}
