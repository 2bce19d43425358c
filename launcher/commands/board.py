"""`rackrun board RUN`: show the dashboard of a run in a browser here, read-only."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from launcher.commands.parse import parse
from launcher.detached.attach import watch
from launcher.detached.locate import RunOptions, is_controlled, reached
from launcher.detached.replay import Replay
from launcher.output.console import last_line, say
from launcher.output.journal import LiveState
from launcher.run.events import Event
from launcher.run.job import Job
from launcher.run.plan import Plan
from launcher.run.result import Result
from launcher.run.state import RunState
from launcher.web.server import served
from rackrun.commandline.options import Examples
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.run_folder import RunFolder
from rackrun.runs import Run, find_run, unknown_run
from rackrun.shapes import Misshapen, parsed_file
from rackrun.signals import interruptible

MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class BoardOptions(RunOptions):
    """Show a run in a browser on this machine, at a secret address that this terminal prints."""

    examples: ClassVar[Examples] = (
        ("{prog} latest", "the newest run"),
        ("{prog} 3fa8", "a detached run"),
    )


def main(args: Sequence[str]) -> int:
    """Serve the page of a run until Ctrl-C."""
    options = parse(BoardOptions, "board", args)
    if not options.run:
        raise UsageError(f"board of which run? type: {called('board')} RUN")
    run = find_run(options.run)
    if run is None and not (options.hosts or options.host_list):
        raise unknown_run(options.run, "board")
    run = run or Run("", "", asked=options.run)
    if run.id and not options.run.startswith(run.id):
        say(str(run))
    with suppress(KeyboardInterrupt), interruptible():
        if run.folder and (run.is_over or not is_controlled(run, options)):
            with served(partial(of_folder, run.folder)) as address:
                stay(address)
        else:
            _show_detached(run, options)
    return 0


def _show_detached(run: Run, options: RunOptions) -> None:
    opened: list[WebDisplay] = []

    def screen(job: Job, plan: Plan, plain: bool) -> WebDisplay:
        del plain
        opened.append(WebDisplay(job, plan))
        return opened[-1]

    with (
        reached(run, options) as reached_run,
        served(lambda: opened[-1].state if opened else {"waiting": "looking"}) as address,
        Replay(screen, False, lambda attempt: Path(attempt.folder)) as replay,
    ):
        say(f"board: {address}")
        watch(reached_run, replay, follow=True)
        stay(address)


def stay(address: str) -> None:
    """Print the address, and wait for Ctrl-C."""
    say(f"board: {address} (Ctrl-C ends it; the run continues)")
    while True:
        time.sleep(3600)


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
        self.live = LiveState(job, plan)
        self.state: Mapping[str, Any] = {"waiting": "reading the record of the run"}

    def __exit__(self, *reason: object) -> None:
        """Leave the page as it is."""

    def show(self, event: Event) -> None:
        """Take the points of the curves."""
        self.live.take(event)

    def note(self, text: str) -> None:
        """Leave lines out of the page: `attach` and `logs` have them."""

    def draw(self, run: RunState, now: float) -> None:
        """Replace what the page shows."""
        self.state = self.live.at(run, now)

    def finish(self, result: Result) -> None:
        """Show how the run ended, beside what was seen last."""
        self.state = {**self.state, "ended": last_line(result)}
