"""`attach RUN`: print the output of a run from its first line to its last."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.errors import HostLost
from rackrun.launcher.lifecycle.starter import how_to_see_and_end
from rackrun.launcher.output.console import say
from rackrun.launcher.output.event_log import exit_code_in
from rackrun.launcher.output.run_printer import LOOK_SECONDS, RunPrinter
from rackrun.launcher.run.settings import OnOptions
from rackrun.run_folder import RunFolder
from rackrun.runs import SHORT_ID, Run, is_supervised
from rackrun.signals import interruptible


@dataclass(frozen=True)
class AttachOptions(OnOptions):
    """Print all output of a run, and follow it; Ctrl-C ends only this command."""

    examples: ClassVar[Examples] = (
        ("{prog} 3fa8", "the run whose ID begins with 3fa8"),
        ("{prog} --plain catdog", "the newest of this name, as plain lines"),
    )

    run: Positional[str] = ""
    """The run: ID, start of an ID, name, folder, or latest (default: the only running one)."""
    plain: bool = False
    """Print plain lines instead of the dashboard."""


def attach(run: Run, options: AttachOptions) -> int:
    """Show the run from its beginning until its end, or until Ctrl-C."""
    if not run.folder.output.exists():
        hint = f"its output: {called('logs')} {run.id[:SHORT_ID]}"
        raise UsageError(f"{run} has nothing here that could be shown again; {hint}")
    printer = RunPrinter(run.folder, options.plain)
    with interruptible():
        try:
            printer.follow(partial(_wait_for_end, run.folder, printer))
        except KeyboardInterrupt as interrupt:
            say(f"detached, the run continues; {how_to_see_and_end(run.id[:SHORT_ID])}")
            return int(interrupt.args[0]) if interrupt.args else 0
    if printer.closed:
        return 128 + signal.SIGPIPE
    code = exit_code_in(run.folder.events)
    if code is None:
        say("the launcher of the run is gone, and its hosts have ended it")
        say(f"to verify that, type: {called('stop')} {run.id[:SHORT_ID]}")
        return HostLost.exit_code
    return code


def _wait_for_end(folder: RunFolder, printer: RunPrinter) -> bool:
    if printer.closed or exit_code_in(folder.events) is not None or not is_supervised(folder):
        return True
    time.sleep(LOOK_SECONDS)
    return False
