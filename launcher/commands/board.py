"""`rackrun board RUN --web`: show the dashboard of a run in a browser here, read-only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.commands.parse import parse
from launcher.detached.attach import interruptible, watch
from launcher.detached.locate import RunOptions, reached
from launcher.detached.replay import Replay
from launcher.output.console import say
from launcher.run.job import Job
from launcher.run.plan import Plan
from launcher.web.server import served
from launcher.web.watch import WebDisplay, of_folder
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.run_report.called import run_called

ABOUT = "Show a run in a browser on this machine: a run folder here, or a detached run by its ID."


@dataclass(frozen=True)
class BoardOptions(RunOptions):
    """Options of `board`."""

    web: bool = False
    """Serve the page on 127.0.0.1, at a secret address that this terminal prints."""


def main(args: Sequence[str]) -> int:
    """Serve the page of a run until Ctrl-C."""
    options = parse(BoardOptions, "board", args, ABOUT)
    if not options.run:
        raise UsageError(f"board of which run? type: {called('board')} RUN --web")
    if not options.web:
        attach = f"{called('attach')} {options.run}"
        raise UsageError(f"board: add --web; on this terminal, type: {attach}")
    with suppress(KeyboardInterrupt), interruptible():
        if (folder := run_called(options.run)).is_dir():
            _show_folder(folder)
        else:
            _show_detached(options)
    return 0


def _show_folder(folder: Path) -> None:
    """Serve what the launcher of a run writes into its folder."""
    with served(partial(of_folder, folder)) as address:
        stay(address)


def _show_detached(options: BoardOptions) -> None:
    """Serve what the record of a detached run has, as it grows."""
    opened: list[WebDisplay] = []

    def screen(job: Job, plan: Plan, plain: bool) -> WebDisplay:
        del plain
        opened.append(WebDisplay(job, plan))
        return opened[-1]

    with (
        reached(options) as there,
        served(lambda: opened[-1].state if opened else {"waiting": "looking"}) as address,
        Replay(screen, False, lambda attempt: Path(attempt.folder)) as replay,
    ):
        say(f"board: {address}")
        watch(there, replay, on=True)
        stay(address)


def stay(address: str) -> None:
    """Print the address, and wait for Ctrl-C."""
    say(f"board: {address} (Ctrl-C ends it; the run continues)")
    while True:
        time.sleep(3600)
