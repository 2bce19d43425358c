"""`rackrun board RUN`: show the dashboard of a run in a browser here, read-only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from launcher.commands.parse import parse
from launcher.detached.attach import interruptible, watch
from launcher.detached.locate import RunOptions, is_controlled, reached
from launcher.detached.replay import Replay
from launcher.output.console import say
from launcher.run.job import Job
from launcher.run.plan import Plan
from launcher.web.server import served
from launcher.web.watch import WebDisplay, of_folder
from rackrun.commandline.options import Examples
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.runs import Run, find_run, unknown_run


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
            _show_folder(run.folder)
        else:
            _show_detached(run, options)
    return 0


def _show_folder(folder: Path) -> None:
    """Serve what the launcher of a run writes into its folder."""
    with served(partial(of_folder, folder)) as address:
        stay(address)


def _show_detached(run: Run, options: RunOptions) -> None:
    """Serve what the record of a detached run has, as it grows."""
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
        watch(reached_run, replay, on=True)
        stay(address)


def stay(address: str) -> None:
    """Print the address, and wait for Ctrl-C."""
    say(f"board: {address} (Ctrl-C ends it; the run continues)")
    while True:
        time.sleep(3600)
