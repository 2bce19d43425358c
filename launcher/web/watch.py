"""What the page shows: from the files of a run on this machine, or from a detached run's record."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from launcher.output.console import last_line
from launcher.output.journal import Curves, live
from launcher.output.run_view import view
from launcher.run.events import Event, Report
from launcher.run.job import Job
from launcher.run.plan import Plan
from launcher.run.result import Result
from launcher.run.state import RunState
from rackrun.run_folder import RunFolder
from rackrun.shapes import Misshapen, parsed_file

MOST_BYTES = 1 << 24


def of_folder(folder: Path) -> Mapping[str, Any]:
    """Return what live.json of a run has; how the run ended when there is none any more."""
    files = RunFolder(folder)
    for path, name in ((files.live, "run"), (files.result, "result")):
        try:
            state = parsed_file(path, dict[str, Any], MOST_BYTES)
        except (OSError, Misshapen):
            continue
        return state if name == "run" else {"ended": f"{state.get('verdict', 'ended')}"}
    return {"waiting": "the run has not begun, or its launcher was killed"}


class WebDisplay(AbstractContextManager["WebDisplay"]):
    """A display of a detached run whose page is in a browser."""

    closed = False

    def __init__(self, job: Job, plan: Plan) -> None:
        """Begin with nothing known."""
        self.job = job
        self.first_rank = plan.hosts[0].first_rank
        self.curves = Curves()
        self.state: Mapping[str, Any] = {"waiting": "reading the record of the run"}

    def __exit__(self, *reason: object) -> None:
        """Leave the page as it is."""

    def show(self, event: Event) -> None:
        """Take the points of the curves."""
        if isinstance(event, Report) and event.rank == self.first_rank:
            self.curves.add(event.fields)

    def note(self, text: str) -> None:
        """Leave lines out of the page: `attach` and `logs` have them."""

    def draw(self, run: RunState, now: float) -> None:
        """Replace what the page shows."""
        shown = view(run, self.job.work.name, self.job.folder.path, now)
        self.state = live(shown, self.curves)

    def finish(self, result: Result) -> None:
        """Show how the run ended, beside what was seen last."""
        self.state = {**self.state, "ended": last_line(result)}
