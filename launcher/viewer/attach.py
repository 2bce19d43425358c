"""`attach RUN`: print the output of a run from its first line to its last."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.errors import HostLost
from rackrun.launcher.lifecycle.session import open_screen
from rackrun.launcher.lifecycle.starter import see_and_end
from rackrun.launcher.output.console import say
from rackrun.launcher.run.settings import ReachOptions
from rackrun.launcher.viewer.follow import entries_of
from rackrun.launcher.viewer.replay import Replay
from rackrun.run_folder import RunFolder
from rackrun.runs import SHORT_ID, Run
from rackrun.signals import interruptible

TURN_SECONDS = 0.1


@dataclass(frozen=True)
class AttachOptions(ReachOptions):
    """Print all output of a run, and follow it; Ctrl-C ends only that."""

    examples: ClassVar[Examples] = (
        ("{prog} 3fa8", "the run whose ID begins so"),
        ("{prog} --plain catdog", "the newest of this name, without the dashboard"),
    )

    run: Positional[str] = ""
    """The run: ID, start of an ID, name, folder, or latest."""
    plain: bool = False
    """Print plain lines instead of the dashboard."""


def attach(run: Run, options: AttachOptions) -> int:
    """Show the run from its beginning until its end, or until Ctrl-C."""
    if run.folder is None or not RunFolder(run.folder).events.exists():
        hint = f"its output: {called('logs')} {run.id[:SHORT_ID]}"
        raise UsageError(f"{run} has nothing here that could be shown again; {hint}")
    with interruptible():
        try:
            with Replay(open_screen, options.plain) as replay:
                watch(RunFolder(run.folder), replay, follow=True)
        except KeyboardInterrupt as interrupt:
            say(f"detached, the run continues; {see_and_end(run.id[:SHORT_ID])}")
            return int(interrupt.args[0]) if interrupt.args else 0
    return _exit_code(run, replay)


def _exit_code(run: Run, replay: Replay) -> int:
    if replay.closed:
        return 128 + signal.SIGPIPE
    if replay.code is None:  # its entries end without the end of the run
        say("what supervised the run is gone, and its hosts have ended it")
        say(f"what is left: {called('status')} {run.id[:SHORT_ID]}")
        return HostLost.exit_code
    return replay.code


def watch(folder: RunFolder, replay: Replay, follow: bool) -> None:
    """Feed the entries of a run to a replay, until there are no more or its reader has gone."""
    for item in entries_of(folder, follow):
        if item is None:
            time.sleep(TURN_SECONDS)
            replay.wait()
        else:
            replay.take(*item)
        if replay.closed:
            return
