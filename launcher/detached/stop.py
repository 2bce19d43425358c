"""`./run-ssh stop RUN-ID`: stop a run as Ctrl-C would, and verify every host afterwards."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from launcher.detached.answers import ControllerAlive, EmptyAnswer, RunAnswer, StopAnswer, call
from launcher.detached.entries import result_of
from launcher.detached.locate import (
    RUN_BYTES,
    DetachedRun,
    RunOptions,
    TooLate,
    call_in_time,
    reached,
    run_manager_on,
)
from launcher.detached.status import HostStatus, status_of_all
from launcher.errors import HostLost, HostUnreachable
from launcher.output.console import last_line, say
from launcher.remote import run_manager
from launcher.supervision import agent_protocol
from launcher.transport import bootstrap
from launcher.transport.parallel import all_or_raise, each
from launcher.transport.rpc import RpcClient
from rackrun.commands import called
from rackrun.errors import Problem
from rackrun.terminal import one_line
from rackrun.units import plural

LOOK_SECONDS = 0.5
CONTROLLER_SECONDS = 60.0  # for a controller to end a run, besides the time for a checkpoint
NOW_SECONDS = 20.0  # for one that is told to end it at once
KILLED_SECONDS = 10.0  # for one that was killed
LINGER_SECONDS = 20.0  # for agents without a controller: heartbeat timeout, grace, a busy host
SWEEP_SECONDS = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class StopOptions(RunOptions):
    """Options of `./run-ssh stop`."""

    force: bool = False
    """Kill every process at once, without a checkpoint."""


def stop(options: StopOptions) -> int:
    """Stop the run as Ctrl-C would, and verify every host; return the exit code."""
    linger_seconds = LINGER_SECONDS
    with reached(options, need_controller=False, need_record=False) as there:
        try:
            if there.error:
                _reach_controller(there)
            if there.client is not None:
                _interrupt(there, options.force)
        except Problem as error:
            if not options.force:
                raise HostUnreachable(f"{error}; {_hint_for(there.run)}") from error
            say(f"{one_line(str(error))}; ending what runs on the others")
            linger_seconds = 0.0
        left = is_left(there, linger_seconds)
    return HostLost.exit_code if left else 0


def _hint_for(run: str) -> str:
    """Return the command that ends a run whose controller cannot be reached."""
    return f"without its controller, so without a checkpoint: {called('stop')} --force {run}"


def _reach_controller(there: DetachedRun) -> None:
    """Connect to the controller's host, which has not found the record of the run in time.

    Ending a controller needs nothing from the home directory, whose disk may be down. But only the
    record completes an id, so that the whole id must have been typed.
    """
    if len(there.run) != 2 * RUN_BYTES:
        raise HostUnreachable(f"{there.host.label}: {there.error}; give the whole id of the run")
    if there.host.label in there.silent:
        raise there.silent[there.host.label]
    (there.place,) = all_or_raise(there.network.try_each([there.host]))
    there.client = call_in_time(
        there, lambda: RpcClient(there.place, run_manager, there.host.python or "")
    )


def _interrupt(there: DetachedRun, now: bool) -> None:
    """End a detached run, and print how it has ended."""
    if _call(there, StopAnswer, "interrupt").done:
        say("stopping" if now else "stopping; the ranks may save a checkpoint first")
    else:
        say("the run has already ended")
    _wait_for_end(there, now)
    try:
        finish = _call(there, RunAnswer, "find").finish
    except TooLate as error:
        say(str(error))
        return
    if finish:
        say(last_line(result_of(finish, Path(finish.folder))))


def _wait_for_end(there: DetachedRun, now: bool) -> None:
    """Wait until the controller has ended; `now`: repeat the order meanwhile."""
    seconds = NOW_SECONDS if now else CONTROLLER_SECONDS
    if not now and there.found.summary:
        seconds += there.found.summary.checkpoint_seconds
    deadline = time.monotonic() + seconds
    while _call(there, ControllerAlive, "alive").alive:
        time.sleep(LOOK_SECONDS)
        is_late = time.monotonic() > deadline
        if is_late:
            say("the controller does not answer: killing it")
        if now or is_late:  # two signals at once may arrive as one
            _call(there, StopAnswer, "interrupt", kill=is_late)
        if is_late and time.monotonic() > deadline + KILLED_SECONDS:
            raise HostLost(f"{there.host.label}: the controller cannot be killed: its disk is down")


def _call(there: DetachedRun, shape: type[T], question: str, **words: object) -> T:
    """Return the run manager's answer, within the time limit."""

    def ask() -> T:
        return call(there.host.label, there.client, shape, question, run=there.run, **words)

    return call_in_time(there, ask)


def is_left(there: DetachedRun, linger_seconds: float) -> bool:
    """End what is left on any host; return True while something may still be there."""
    deadline = time.monotonic() + linger_seconds
    hosts = status_of_all(there)
    while any(host.processes for host in hosts) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        hosts = status_of_all(there)
    if left := [host for host in hosts if host.processes]:
        outcomes = each(partial(_clean_up, there.run), left, SWEEP_SECONDS, _too_late)
        failed = {host.name: outcome for host, outcome in zip(left, outcomes, strict=True)}
        hosts = [_with_failure(host, failed.get(host.name)) for host in status_of_all(there)]
    unclean = [host for host in hosts if host.error or host.processes]
    for host in unclean:
        names = ", ".join(str(process.pid) for process in host.processes)
        say(f"{host.name}: {host.error or f'still running: {names}'}")
    clean = len(hosts) - len(unclean)
    say(f"{clean} of {plural(len(hosts), 'host')} clean" + ": nothing left running" * (not unclean))
    return bool(unclean)


def _too_late(host: HostStatus) -> Problem:
    """Return the error for a host that has not confirmed its end."""
    return HostLost(f"{host.name}: has not ended it within {SWEEP_SECONDS:g} s")


def _with_failure(host: HostStatus, failure: Problem | None) -> HostStatus:
    """Return the findings after the cleanup, with the reason where it failed."""
    return replace(host, error=one_line(str(failure))) if failure and host.processes else host


def _clean_up(run: str, host: HostStatus) -> None:
    """End what is left on a host: its relays, and by a new agent what an earlier one has left."""
    assert host.place is not None
    with run_manager_on(host.place, host.python) as client:
        call(host.name, client, EmptyAnswer, "sweep", run=run)
    for scratch in {process.scratch for process in host.processes} - {""}:
        channel = host.place.open(bootstrap.bootstrap(host.python))
        channel.send(agent_protocol.opening(bootstrap.order(do="sweep", scratch=scratch)))
        while channel.receive():
            pass
