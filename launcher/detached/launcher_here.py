"""The launcher of an attached run on this machine, and what the folder of the run has about it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from launcher.config.settings_file import read_settings
from launcher.detached.entries import Ending
from launcher.detached.replies import LiveRun, RunFacts
from launcher.remote import processes
from launcher.remote.run_manager import live_in
from launcher.run.job import Limits
from launcher.run.plan import Plan
from launcher.supervision.signals import STOP_SIGNAL
from rackrun.errors import UsageError
from rackrun.run_folder import RunFolder
from rackrun.runs import MOST_BYTES, is_supervised
from rackrun.shapes import Misshapen, parsed_file, shaped


class LauncherHere:
    """A launcher, found by the lock that it holds on the plan of its run."""

    title = "the launcher"

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @property
    def checkpoint_seconds(self) -> float:
        """How long the ranks have for a checkpoint."""
        with suppress(UsageError, TypeError, ValueError):
            table = read_settings(self.folder.settings).launcher
            return float(table.get("checkpoint-seconds", Limits().checkpoint_seconds))
        return Limits().checkpoint_seconds

    def is_alive(self) -> bool:
        """Return True until the run has a result, or the launcher is gone."""
        return not self.folder.result.exists() and is_supervised(self.folder.plan)

    def interrupt(self, kill: bool = False) -> bool:
        """Have it end its run, or kill it; return False for one that is not of this account here.

        A run may be started on another machine that shares the folder.
        """
        if pid := _lock_holder(self.folder.plan):
            # Not SIGINT, which a launcher in the background of a script ignores.
            processes.send_signal(pid, signal.SIGKILL if kill else STOP_SIGNAL)
        return bool(pid)

    def ending(self) -> Ending | None:
        """Return how the newest attempt ended, once it has."""
        return facts_in(self.folder).finish


def facts_in(folder: RunFolder) -> RunFacts:
    """Return what the files of a run have about it; raise UsageError for a folder without one."""
    plan_in(folder)
    live, ending = LiveRun(), None
    with suppress(OSError, Misshapen):
        ending = parsed_file(folder.result, Ending, MOST_BYTES)
    with suppress(Misshapen):
        live = shaped(live_in(str(folder.path)), LiveRun, folder.live.name)
    return RunFacts(
        folder=str(folder.path),
        live=live,
        alive=ending is None and is_supervised(folder.plan),
        finish=ending,
        end=ending.exit_code if ending else None,
    )


def plan_in(folder: RunFolder) -> Plan:
    """Return the plan of a run; raise UsageError for a folder without one."""
    try:
        return parsed_file(folder.plan, Plan, MOST_BYTES)
    except (OSError, Misshapen) as error:
        raise UsageError(f"{folder.path}: no run that a launcher started: {error}") from None


def _lock_holder(plan: Path) -> int:
    """Return the process of this account that holds the lock of a plan; 0 where there is none."""
    target = str(plan.resolve())
    with suppress(OSError):  # a system without /proc
        for pid in processes.all_pids():
            for descriptor in processes.names_in(f"/proc/{pid}/fd"):
                if processes.link_target(f"/proc/{pid}/fd/{descriptor}") != target:
                    continue
                with suppress(OSError), Path(f"/proc/{pid}/fdinfo/{descriptor}").open() as file:
                    if "FLOCK" in file.read() and pid != os.getpid():
                        return pid
    return 0
