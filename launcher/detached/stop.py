"""`./run-ssh stop RUN`: stop a run as Ctrl-C would, and verify every host afterwards."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeAlias, TypeVar

from rackrun.commandline.options import Examples
from rackrun.commands import called
from rackrun.errors import Problem, UsageError
from rackrun.launcher.detached.entries import Ending, result_of
from rackrun.launcher.detached.locate import (
    RUN_BYTES,
    ReachedRun,
    RunOptions,
    TooLate,
    call_in_time,
    facts_in,
    is_controlled,
    reached,
    run_manager_on,
)
from rackrun.launcher.detached.replies import EmptyReply, RunFacts, YesOrNo
from rackrun.launcher.detached.status import HostStatus, status_of_all
from rackrun.launcher.errors import HostLost, HostUnreachable
from rackrun.launcher.output.console import last_line, say
from rackrun.launcher.remote import processes, run_manager
from rackrun.launcher.run.job import Limits
from rackrun.launcher.settings_file import read_settings
from rackrun.launcher.supervision import agent_protocol
from rackrun.launcher.supervision.signals import STOP_SIGNAL
from rackrun.launcher.transport import bootstrap
from rackrun.launcher.transport.parallel import all_or_raise, each
from rackrun.launcher.transport.rpc import RpcClient
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

T = TypeVar("T")


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
    if run.folder and not is_controlled(run, options):
        launcher = LocalLauncher(RunFolder(run.folder))
        was_running = _interrupt(launcher, run.id, options.force)
        if not (was_running or options.name_hosts):
            ending = launcher.ending()
            if ending and set(ending.hosts.values()) == {"clean"}:
                return 0
    linger_seconds = LINGER_SECONDS
    with reached(run, options, need_controller=False) as reached_run:
        try:
            if reached_run.error:
                _reach_controller(reached_run)
            if reached_run.client is not None:
                _interrupt(Controller(reached_run), reached_run.id, options.force)
        except Problem as error:
            if not options.force:
                hint = "without its controller, so without a checkpoint"
                command = f"{called('stop')} --force {reached_run.id}"
                raise HostUnreachable(f"{error}; {hint}: {command}") from error
            say(f"{one_line(str(error))}; ending what runs on the others")
            linger_seconds = 0.0  # no controller has told agents to end: they are ended at once
        left = is_left(reached_run, linger_seconds)
    return HostLost.exit_code if left else 0


class Controller:
    """The controller of a detached run, by the run manager on its host."""

    def __init__(self, run: ReachedRun) -> None:
        self.run = run
        self.title = f"the controller on {run.host.label}"

    @property
    def checkpoint_seconds(self) -> float:
        """As its launcher was started with; 0 where the record of the run cannot be read."""
        summary = self.run.facts.summary
        return summary.checkpoint_seconds if summary else 0.0

    def is_alive(self) -> bool:
        """Return whether there is such a process."""
        return self._call(YesOrNo, "alive").yes

    def interrupt(self, kill: bool = False) -> bool:
        """Send it the signal; return False where there is none."""
        return self._call(YesOrNo, "interrupt", kill=kill).yes

    def ending(self) -> Ending | None:
        """Return what its record ends with."""
        return self._call(RunFacts, "find").finish

    def _call(self, shape: type[T], question: str, **arguments: object) -> T:
        run, client = self.run, self.run.client
        reply = call_in_time(run, lambda: client.call(question, run=run.id, **arguments))
        value: T = client.parsed(reply, shape)
        return value


class LocalLauncher:
    """The launcher of an attached run on this machine, found by its lock on the plan."""

    title = "the launcher"

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
        return not self.folder.result.exists() and is_supervised(self.folder.plan)

    def interrupt(self, kill: bool = False) -> bool:
        """Signal it; return False where it is no process of this account on this machine.

        The run may have been started on another machine that shares the folder.
        """
        if pid := _lock_holder(self.folder.plan):
            # Not SIGINT, which a launcher in the background of a script ignores.
            processes.send_signal(pid, signal.SIGKILL if kill else STOP_SIGNAL)
        return bool(pid)

    def ending(self) -> Ending | None:
        """Return how the newest attempt ended, once it has."""
        return facts_in(self.folder).finish


RunSupervisor: TypeAlias = Controller | LocalLauncher
"""The process that supervises a run, and lets its ranks save before it ends them."""


def _lock_holder(plan: Path) -> int:
    target = str(plan.resolve())
    with suppress(OSError):  # a system without /proc
        for pid in processes.all_pids():
            for descriptor in processes.names_in(f"/proc/{pid}/fd"):
                if processes.link_target(f"/proc/{pid}/fd/{descriptor}") != target:
                    continue
                # any program may have the plan open; the launcher is the one that has locked it
                with suppress(OSError), Path(f"/proc/{pid}/fdinfo/{descriptor}").open() as file:
                    if "FLOCK" in file.read() and pid != os.getpid():
                        return pid
    return 0


def _reach_controller(run: ReachedRun) -> None:
    # The controller's host has not found the record of the run in time. Ending a controller needs
    # nothing from the home directory, whose disk may be down; but only the record completes an id.
    if len(run.id) != 2 * RUN_BYTES:
        raise HostUnreachable(f"{run.host.label}: {run.error}; give the whole id of the run")
    if run.host.label in run.silent:
        raise run.silent[run.host.label]
    (run.transport,) = all_or_raise(run.network.try_each([run.host]))
    run.client = call_in_time(
        run, lambda: RpcClient(run.transport, run_manager, run.host.python or "")
    )


def _interrupt(supervisor: RunSupervisor, run: str, now: bool) -> bool:
    was_running = supervisor.interrupt()
    if was_running:
        say("stopping" if now else "stopping; the ranks may save a checkpoint first")
    elif not supervisor.is_alive():
        say("the run has already ended")
    elif now:
        return False  # --force ends the agents themselves, which needs no launcher
    else:
        raise UsageError(
            f"{supervisor.title} of run {run} is not a process of yours on this machine; press"
            f" Ctrl-C there, or, without a checkpoint, type: {called('stop')} --force {run}"
        )
    _wait_for_end(supervisor, now)
    try:
        if ending := supervisor.ending():
            say(last_line(result_of(ending, Path(ending.folder))))
    except TooLate as error:  # the controller is gone; only its record cannot be read
        say(str(error))
    return was_running


def _wait_for_end(supervisor: RunSupervisor, now: bool) -> None:
    seconds = NOW_SECONDS if now else SUPERVISOR_SECONDS + supervisor.checkpoint_seconds
    deadline = time.monotonic() + seconds
    while supervisor.is_alive():
        time.sleep(LOOK_SECONDS)
        is_late = time.monotonic() > deadline
        if is_late:
            say(f"{supervisor.title} does not answer: killing it")
        if now or is_late:  # two signals at once may arrive as one
            supervisor.interrupt(kill=is_late)
        if is_late and time.monotonic() > deadline + KILLED_SECONDS:
            raise HostLost(f"{supervisor.title} cannot be killed: its disk is down")


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
            partial(_clean_up, run.id),
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


def _clean_up(run_id: str, host: HostStatus) -> None:
    assert host.transport is not None
    # the run manager ends relays; a new agent ends what an earlier one has left
    with run_manager_on(host.transport, host.python) as client:
        client.parsed(client.call("sweep", run=run_id), EmptyReply)
    for scratch in {process.scratch for process in host.processes} - {""}:
        channel = host.transport.open(bootstrap.bootstrap(host.python))
        channel.send(agent_protocol.opening(bootstrap.order(do="sweep", scratch=scratch)))
        while channel.receive():
            pass
