"""Attached runs: a launcher looks after each, on a terminal of this machine or of another one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.catalog.folders import run_in, runs_in
from launcher.catalog.listed import ListedRun, table
from launcher.config.settings_file import read_settings
from launcher.detached.known_runs import KnownRun, recall
from launcher.detached.locate import DetachedRun, is_attached, open_network, reached
from launcher.detached.stop import (
    CONTROLLER_SECONDS,
    LINGER_SECONDS,
    LOOK_SECONDS,
    StopOptions,
    is_left,
)
from launcher.errors import HostLost
from launcher.output.console import say
from launcher.output.log_files import is_supervised
from launcher.remote import processes
from launcher.run.hosts import Host
from launcher.run.job import Limits, RunFolder
from launcher.transport.local import LocalTransport
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.shapes import Misshapen

RUNS = Path("runs")


@dataclass(frozen=True)
class AttachedRun:
    """A run, its folder on this machine, and where its hosts are."""

    run: str
    folder: RunFolder | None
    """None where this machine has none."""
    known: KnownRun | None
    """What was recorded here when it began; None once its hosts were clean."""

    @property
    def is_running(self) -> bool:
        """Return True while a launcher looks after it, on whatever machine."""
        there = self.folder
        return there is not None and not there.result.exists() and is_supervised(there.plan)


def attached_run(called_so: str) -> AttachedRun | None:
    """Return the attached run of this id, start of an id or name; None for any other run."""
    run, known = recall(called_so)
    if known is not None:
        folders = runs_in(Path(known.runs)) if is_attached(run) else ()
        path = next((one.folder for one in folders if one.run == run), "")
        return AttachedRun(run, _folder(path), known) if is_attached(run) else None
    found = list(runs_in(RUNS))
    meant = [one for one in found if one.run.startswith(called_so)]
    meant = meant or [one for one in found if one.name == called_so and one.state == "running"]
    if len(meant) > 1:
        names = ", ".join(one.run for one in meant)
        raise UsageError(f"several runs are called {called_so}: {names}; type more of the id")
    if meant:
        return AttachedRun(meant[0].run, _folder(meant[0].folder), None)
    return AttachedRun(run, None, None) if is_attached(run) else None


def _folder(path: str) -> RunFolder | None:
    return RunFolder(Path(path)) if path else None


def stop_attached(run: AttachedRun, options: StopOptions) -> int:
    """Press Ctrl-C for the launcher of a run, wait for its end, and look at every host."""
    if run.folder and run.is_running:
        if pid := _launcher_of(run.folder.plan):
            _interrupt(run.folder, pid, options.force)
        elif not options.force:
            raise UsageError(
                f"the launcher of run {run.run} is not a process of yours on this machine; press"
                f" Ctrl-C there, or, without a checkpoint, type: {called('stop')} --force {run.run}"
            )
    else:
        say("the run has already ended")
    with _hosts(run, options) as there:
        left = is_left(there, LINGER_SECONDS)
    return HostLost.exit_code if left else 0


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
def _hosts(run: AttachedRun, options: StopOptions) -> Iterator[DetachedRun]:
    """Yield the hosts of a run: those that are typed, this machine, or those written down here."""
    if run.folder and not (options.hosts or options.host_list) and _is_of_this_machine(run.folder):
        try:
            host = Host(run_in(run.folder.path).hosts[0])
        except (OSError, Misshapen) as error:
            hint = f"type: {called('stop')} --host-list localhost {run.run}"
            raise UsageError(f"{run.folder.path}: its plan is gone: {error}; {hint}") from None
        network = open_network("", options)
        places = [LocalTransport(host.label)]
        yield DetachedRun(run.run, network, [host], host, str(RUNS), places=places)
        return
    known = (run.run, run.known)
    with reached(options, need_controller=False, need_record=False, known=known) as there:
        yield there


def _is_of_this_machine(folder: RunFolder) -> bool:
    """Return True for a run of `./run-local`."""
    with suppress(UsageError):
        return read_settings(folder.settings).launch == "local"
    return False


def show_attached(run: AttachedRun, as_json: bool) -> int:
    """Print what is known here of a run, as the list has it."""
    listed = _listed(run)
    sys.stdout.write(f"{json.dumps(asdict(listed), indent=2)}\n" if as_json else table([listed]))
    return 0


def why_not_followed(run: AttachedRun) -> str:
    """Return where to look in place of `attach` and `logs`, which follow detached runs."""
    folder = _listed(run).folder
    if run.is_running:
        board = f"{called('board')} {folder} --web"
        return f"run {run.run} is attached to a terminal; its logs: {folder}/logs; type: {board}"
    return f"run {run.run} was attached and is over; its logs: {folder}/logs"


def _listed(run: AttachedRun) -> ListedRun:
    """Return the run as the list shows it."""
    if run.folder is None:
        raise UsageError(f"run {run.run} has no folder here; type: {called('stop')} {run.run}")
    return run_in(run.folder.path)
