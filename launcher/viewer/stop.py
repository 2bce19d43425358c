"""`stop RUN`: stop a run as Ctrl-C would, and verify every host afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
from rackrun.errors import Problem, UsageError
from rackrun.launcher.errors import HostLost
from rackrun.launcher.output.console import last_line, say
from rackrun.launcher.remote import processes
from rackrun.launcher.run.settings import Limits, ReachOptions
from rackrun.launcher.settings_file import read_settings
from rackrun.launcher.supervision.signals import STOP_SIGNAL
from rackrun.launcher.transport.bootstrap import order
from rackrun.launcher.transport.parallel import each
from rackrun.launcher.transport.rpc import RpcClient
from rackrun.launcher.viewer.reach import ReachedHost, is_of_scheduler, look_for, plan_of, reached
from rackrun.run_files import end_in
from rackrun.run_folder import RunFolder
from rackrun.runs import Run, is_over
from rackrun.terminal import one_line
from rackrun.units import plural

LOOK_SECONDS = 0.5
SUPERVISOR_SECONDS = 60.0  # to end a run, besides the time for a checkpoint
NOW_SECONDS = 20.0  # for one that is told to end it at once
KILLED_SECONDS = 10.0  # for one that was killed
LINGER_SECONDS = 20.0  # for agents without a controller: heartbeat timeout, grace, a busy host
SWEEP_SECONDS = 60.0


@dataclass(frozen=True)
class StopOptions(ReachOptions):
    """Stop a run as Ctrl-C would, and verify every host."""

    examples: ClassVar[Examples] = (
        ("{prog} 3fa8", "save a checkpoint and end"),
        ("{prog} --force 3fa8", "kill every process at once"),
    )

    run: Positional[str] = field(kw_only=True)  # never guessed
    """The run: ID, start of an ID, name, folder, or latest."""
    force: bool = False
    """Kill every process at once, without a checkpoint."""


def stop(run: Run, options: StopOptions) -> int:
    """Stop the run as Ctrl-C would, and verify every host; return the exit code."""
    was_running = _end_launcher(run, options.force)
    ending = end_in(run.folder)
    if not was_running and ending and set(ending.hosts.values()) == {"clean"}:
        return 0
    with reached(run, options) as hosts:
        return HostLost.exit_code if is_left(run, hosts, LINGER_SECONDS) else 0


def _end_launcher(run: Run, now: bool) -> bool:
    """Have the launcher end the run; return False if none of this account runs here."""
    was_running = _signal_launcher(run.folder, STOP_SIGNAL)
    if was_running:
        say("stopping" if now else "stopping; the ranks may save a checkpoint first")
    elif is_over(run.folder):
        say("the run has already ended")
    elif now or is_of_scheduler(plan_of(run.folder)):
        return False  # --force ends the agents themselves, which needs no launcher
    else:
        raise UsageError(
            f"the launcher of run {run.id} is not a process of yours on this machine; press"
            f" Ctrl-C there, or, without a checkpoint, type: {called('stop')} --force {run.id}"
        )
    _wait_for_end(run.folder, now)
    if ending := end_in(run.folder):
        say(last_line(ending))
    return was_running


def _signal_launcher(folder: RunFolder, number: signal.Signals) -> bool:
    """Send a signal; return False after the result, and for no process of this account here.

    The run may have been started on another machine that shares the folder.
    """
    pid = 0 if folder.result.exists() else _lock_holder(folder.events)
    if pid:
        processes.send_signal(pid, number)
    return bool(pid)


def _lock_holder(locked: Path) -> int:
    target = str(locked.resolve())
    with suppress(OSError):  # a system without /proc
        for pid in processes.all_pids():
            for descriptor in processes.names_in(f"/proc/{pid}/fd"):
                if processes.link_target(f"/proc/{pid}/fd/{descriptor}") != target:
                    continue
                # any program may have it open; the launcher is the one that has locked it
                with suppress(OSError), Path(f"/proc/{pid}/fdinfo/{descriptor}").open() as file:
                    if "FLOCK" in file.read() and pid != os.getpid():
                        return pid
    return 0


def _wait_for_end(folder: RunFolder, now: bool) -> None:
    seconds = NOW_SECONDS if now else SUPERVISOR_SECONDS + _checkpoint_seconds(folder)
    deadline = time.monotonic() + seconds
    while not is_over(folder):
        time.sleep(LOOK_SECONDS)
        is_late = time.monotonic() > deadline
        if is_late:
            say("the launcher does not answer: killing it")
            _signal_launcher(folder, signal.SIGKILL)
        elif now:  # two signals at once may arrive as one
            _signal_launcher(folder, STOP_SIGNAL)
        if time.monotonic() > deadline + KILLED_SECONDS:
            raise HostLost("the launcher cannot be killed: its disk is down")


def _checkpoint_seconds(folder: RunFolder) -> float:
    """Return the time of the run for a checkpoint; the default if its settings cannot be read."""
    with suppress(UsageError, TypeError, ValueError):
        table = read_settings(folder.settings).launcher
        return float(table.get("checkpoint-seconds", Limits().checkpoint_seconds))
    return Limits().checkpoint_seconds


def is_left(run: Run, hosts: Sequence[ReachedHost], linger_seconds: float) -> bool:
    """End what is left on any host; return True while something may still be there."""
    deadline = time.monotonic() + linger_seconds
    look_for(run, hosts)
    while any(one.listing.processes for one in hosts) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        look_for(run, hosts)
    if left := [one for one in hosts if one.listing.processes]:
        outcomes = each(_clean_up, left, SWEEP_SECONDS, _not_clean)
        look_for(run, hosts)
        for one, outcome in zip(left, outcomes, strict=True):
            # a host that is clean now counts as clean, even if its clean-up has reported an error
            if outcome is not None and one.listing.processes:
                one.error = one_line(str(outcome))
    unclean = [one for one in hosts if one.error or one.listing.processes]
    for one in unclean:
        names = ", ".join(str(process.pid) for process in one.listing.processes)
        say(f"{one.host.label}: {one.error or f'still running: {names}'}")
    clean = len(hosts) - len(unclean)
    rest = "" if unclean else ": nothing left running"
    say(f"{clean} of {plural(len(hosts), 'host')} clean{rest}")
    return bool(unclean)


def _clean_up(one: ReachedHost) -> None:
    assert not isinstance(one.transport, Problem)
    # a new agent ends what an earlier one has left
    for scratch in {process.scratch for process in one.listing.processes} - {""}:
        client = RpcClient(one.transport, one.listing.python)
        channel, _ = client.hand_over(order(do="sweep", scratch=scratch))
        while channel.receive():
            pass


def _not_clean(one: ReachedHost) -> Problem:
    return HostLost(f"{one.host.label}: has not ended it within {SWEEP_SECONDS:g} s")
