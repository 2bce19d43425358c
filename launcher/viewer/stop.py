"""`stop RUN`: stop a run as Ctrl-C would, and verify every host afterwards."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from rackrun.commandline.options import Examples
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.errors import HostLost
from rackrun.launcher.output.console import last_line, say
from rackrun.launcher.remote import processes
from rackrun.launcher.run.job import Limits
from rackrun.launcher.settings_file import read_settings
from rackrun.launcher.supervision import agent_protocol
from rackrun.launcher.supervision.signals import STOP_SIGNAL
from rackrun.launcher.transport import bootstrap
from rackrun.launcher.transport.parallel import each
from rackrun.launcher.viewer.reach import ReachedRun, RunOptions, facts_in, reached
from rackrun.launcher.viewer.replies import Ending, result_of
from rackrun.launcher.viewer.status import HostStatus, status_of_all
from rackrun.run_folder import RunFolder
from rackrun.runs import Run, is_supervised
from rackrun.terminal import one_line
from rackrun.units import plural

LOOK_SECONDS = 0.5
SUPERVISOR_SECONDS = 60.0  # to end a run, besides the time for a checkpoint
NOW_SECONDS = 20.0  # for one that is told to end it at once
KILLED_SECONDS = 10.0  # for one that was killed
LINGER_SECONDS = 20.0  # for agents without a controller: heartbeat timeout, grace, a busy host
SWEEP_SECONDS = 60.0


@dataclass(frozen=True)
class StopOptions(RunOptions):
    """Stop a run as Ctrl-C would, and verify every host."""

    examples: ClassVar[Examples] = (
        ("{prog} 3fa8", "save a checkpoint and end"),
        ("{prog} --force 3fa8", "kill every process at once"),
    )

    force: bool = False
    """Kill every process at once, without a checkpoint."""


def stop(run: Run, options: StopOptions) -> int:
    """Stop the run as Ctrl-C would, and verify every host; return the exit code."""
    launcher = LocalLauncher(run.folder)
    was_running = _interrupt(launcher, run.id, options.force)
    ending = launcher.ending()
    if not was_running and ending and set(ending.hosts.values()) == {"clean"}:
        return 0
    with reached(run, options) as reached_run:
        left = is_left(reached_run, LINGER_SECONDS)
    return HostLost.exit_code if left else 0


class LocalLauncher:
    """What supervises a run on this machine, found by its lock on the run's events."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @property
    def checkpoint_seconds(self) -> float:
        """As it was started with; the default where its settings cannot be read."""
        with suppress(UsageError, TypeError, ValueError):
            table = read_settings(self.folder.settings).launcher
            return float(table.get("checkpoint-seconds", Limits().checkpoint_seconds))
        return Limits().checkpoint_seconds

    def is_alive(self) -> bool:
        """Return True until the run has a result, or the launcher is gone."""
        return not self.folder.result.exists() and is_supervised(self.folder)

    def interrupt(self, kill: bool = False) -> bool:
        """Signal it; return False after its result, and for no process of this account here.

        The run may have been started on another machine that shares the folder.
        """
        pid = 0 if self.folder.result.exists() else _lock_holder(self.folder.events)
        if pid:
            # Not SIGINT, which a launcher in the background of a script ignores.
            processes.send_signal(pid, signal.SIGKILL if kill else STOP_SIGNAL)
        return bool(pid)

    def ending(self) -> Ending | None:
        """Return how the newest attempt ended, once it has."""
        return facts_in(self.folder).finish


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


def _interrupt(supervisor: LocalLauncher, run: str, now: bool) -> bool:
    was_running = supervisor.interrupt()
    if was_running:
        say("stopping" if now else "stopping; the ranks may save a checkpoint first")
    elif not supervisor.is_alive():
        say("the run has already ended")
    elif now:
        return False  # --force ends the agents themselves, which needs no launcher
    else:
        raise UsageError(
            f"the launcher of run {run} is not a process of yours on this machine; press"
            f" Ctrl-C there, or, without a checkpoint, type: {called('stop')} --force {run}"
        )
    _wait_for_end(supervisor, now)
    if ending := supervisor.ending():
        say(last_line(result_of(ending, supervisor.folder.path)))
    return was_running


def _wait_for_end(supervisor: LocalLauncher, now: bool) -> None:
    seconds = NOW_SECONDS if now else SUPERVISOR_SECONDS + supervisor.checkpoint_seconds
    deadline = time.monotonic() + seconds
    while supervisor.is_alive():
        time.sleep(LOOK_SECONDS)
        is_late = time.monotonic() > deadline
        if is_late:
            say("the launcher does not answer: killing it")
        if now or is_late:  # two signals at once may arrive as one
            supervisor.interrupt(kill=is_late)
        if is_late and time.monotonic() > deadline + KILLED_SECONDS:
            raise HostLost("the launcher cannot be killed: its disk is down")


def is_left(run: ReachedRun, linger_seconds: float) -> bool:
    """End what is left on any host; return True while something may still be there."""
    deadline = time.monotonic() + linger_seconds
    hosts = status_of_all(run)
    while any(host.processes for host in hosts) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        hosts = status_of_all(run)
    if left := [host for host in hosts if host.processes]:
        why = f"has not ended it within {SWEEP_SECONDS:g} s"
        outcomes = each(
            _clean_up,
            left,
            SWEEP_SECONDS,
            lambda host: HostLost(f"{host.name}: {why}"),
        )
        errors = {
            host.name: one_line(str(outcome))
            for host, outcome in zip(left, outcomes, strict=True)
            if outcome is not None
        }
        # a host that is clean now counts as clean, even if its clean-up has reported an error
        hosts = [
            replace(host, error=errors.get(host.name, host.error)) if host.processes else host
            for host in status_of_all(run)
        ]
    unclean = [host for host in hosts if host.error or host.processes]
    for host in unclean:
        names = ", ".join(str(process.pid) for process in host.processes)
        say(f"{host.name}: {host.error or f'still running: {names}'}")
    clean = len(hosts) - len(unclean)
    rest = "" if unclean else ": nothing left running"
    say(f"{clean} of {plural(len(hosts), 'host')} clean{rest}")
    return bool(unclean)


def _clean_up(host: HostStatus) -> None:
    assert host.transport is not None
    # a new agent ends what an earlier one has left
    for scratch in {process.scratch for process in host.processes} - {""}:
        channel = host.transport.open(bootstrap.bootstrap(host.python))
        channel.send(agent_protocol.opening(bootstrap.order(do="sweep", scratch=scratch)))
        while channel.receive():
            pass
