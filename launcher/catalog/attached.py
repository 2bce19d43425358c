"""Attached runs: a launcher looks after each, on a terminal of this machine or of another one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.catalog.folders import run_in
from launcher.catalog.listed import ListedRun, table
from launcher.config.settings_file import read_settings
from launcher.detached.locate import DetachedRun, open_network, reached
from launcher.detached.stop import (
    CONTROLLER_SECONDS,
    LINGER_SECONDS,
    LOOK_SECONDS,
    StopOptions,
    is_left,
)
from launcher.errors import HostLost
from launcher.output.console import say
from launcher.remote import processes
from launcher.run.hosts import Host
from launcher.run.job import Limits
from launcher.transport.local import LocalTransport
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.run_folder import RunFolder
from rackrun.runs import MOST_BYTES, SHORT_ID, Run, is_supervised
from rackrun.shapes import Misshapen, parsed_file


def stop_attached(run: Run, options: StopOptions) -> int:
    """Press Ctrl-C for the launcher of a run, wait for its end, and look at every host."""
    if run.folder and not run.is_over:
        folder = RunFolder(run.folder)
        if pid := _launcher_of(folder.plan):
            _interrupt(folder, pid, options.force)
        elif not options.force:
            raise UsageError(
                f"the launcher of run {run.id} is not a process of yours on this machine; press"
                f" Ctrl-C there, or, without a checkpoint, type: {called('stop')} --force {run.id}"
            )
    else:
        say(f"{run} has already ended")
        if run.folder and not (options.hosts or options.host_list) and _was_clean(run.folder):
            return 0
    with _hosts(run, options) as reached_run:
        left = is_left(reached_run, LINGER_SECONDS)
    return HostLost.exit_code if left else 0


def _was_clean(folder: Path) -> bool:
    """Return True for a run whose launcher has seen every host clean at its end."""
    with suppress(OSError, Misshapen):
        states = parsed_file(RunFolder(folder).result, dict[str, Any], MOST_BYTES).get("hosts")
        return isinstance(states, dict) and set(states.values()) == {"clean"}
    return False


def _interrupt(folder: RunFolder, pid: int, now: bool) -> None:
    """Send SIGINT to a launcher until the run is over; `now`: as often as a user in a hurry."""
    launcher = processes.look_up(pid)
    say("stopping" if now else "stopping; the ranks may save a checkpoint first")
    processes.send_signal(pid, signal.SIGINT)
    deadline = time.monotonic() + CONTROLLER_SECONDS + _checkpoint_seconds(folder)
    while not folder.result.exists() and is_supervised(folder.plan):
        time.sleep(LOOK_SECONDS)
        if now:
            processes.send_signal(pid, signal.SIGINT)
        if launcher is not None and time.monotonic() > deadline:
            say("the launcher does not answer: killing it")
            processes.kill(launcher)
    with suppress(OSError, Misshapen):
        ended = run_in(folder.path)
        say(f"{ended.state} ({ended.exit_code})" if ended.exit_code else ended.state)


def _checkpoint_seconds(folder: RunFolder) -> float:
    """Return how long the ranks have for a checkpoint."""
    with suppress(UsageError, TypeError, ValueError):
        table = read_settings(folder.settings).launcher
        return float(table.get("checkpoint-seconds", Limits().checkpoint_seconds))
    return Limits().checkpoint_seconds


def _launcher_of(plan: Path) -> int:
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


@contextmanager
def _hosts(run: Run, options: StopOptions) -> Iterator[DetachedRun]:
    """Yield the hosts of a run: those that are typed, this machine, or those written down here."""
    if run.folder and not (options.hosts or options.host_list) and _is_of_this_machine(run.folder):
        host = Host(_listed(run).hosts[0])
        network = open_network("", options)
        yield DetachedRun(
            run.id, network, [host], host, "", transports=[LocalTransport(host.label)]
        )
        return
    with reached(run, options, need_controller=False) as reached_run:
        yield reached_run


def _is_of_this_machine(folder: Path) -> bool:
    """Return True for a run of `./run-local`."""
    with suppress(UsageError):
        return read_settings(RunFolder(folder).settings).launch == "local"
    return False


def show_attached(run: Run, as_json: bool) -> int:
    """Print what is known here of a run, as the list has it."""
    listed = _listed(run)
    sys.stdout.write(f"{json.dumps(asdict(listed), indent=2)}\n" if as_json else table([listed]))
    return 0


def _listed(run: Run) -> ListedRun:
    if run.folder is None:
        raise UsageError(f"{run} has no folder here; type: {called('stop')} {run.id[:SHORT_ID]}")
    try:
        return run_in(run.folder)
    except (OSError, Misshapen) as error:
        raise UsageError(f"{run.folder}: no run that a launcher started: {error}") from None
