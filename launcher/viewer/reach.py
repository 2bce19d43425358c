"""Reach the hosts of a run, and ask them which of its processes are there."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from rackrun.errors import Problem, UsageError
from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.run.hosts import THIS_MACHINE, Host
from rackrun.launcher.run.kept_hosts import hosts_in
from rackrun.launcher.run.settings import ReachOptions
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.local import LocalTransport
from rackrun.launcher.transport.parallel import each
from rackrun.launcher.transport.rpc import RpcClient
from rackrun.run_files import MOST_BYTES, RunPlan
from rackrun.run_folder import RunFolder
from rackrun.runs import SHORT_ID, Run
from rackrun.shapes import Misshapen, Shape, at_most, between, parsed_file
from rackrun.terminal import one_line

REPLY_SECONDS = 20.0
"""Time for the reply to one request: a home directory whose file server is down never answers."""


@dataclass
class ReachedRun:
    """A run, and its hosts."""

    run: Run
    hosts: Sequence[Host]
    transports: Sequence[Transport | Problem]
    silent: dict[str, Problem] = field(default_factory=dict)
    """Hosts on which not even a program starts in time, by label: they are not asked again."""


@contextmanager
def reached(run: Run, options: ReachOptions) -> Iterator[ReachedRun]:
    """Reach the hosts of a run, as its folder has them."""
    plan = plan_of(run.folder)
    known = hosts_in(run.folder)
    if known is None and is_here(plan):
        here = [Host(host.name) for host in plan.hosts]
        yield ReachedRun(run, here, [LocalTransport(host.name) for host in here])
        return
    if known is None:
        raise UsageError(f"{run.folder.hosts}: names no hosts, or is not a file of yours")
    from rackrun.launcher.transport.ssh import open_network  # Fabric takes its time to import

    with closing(open_network(options, known.ssh_config)) as network:
        yield ReachedRun(run, known.hosts, network.try_each(known.hosts))


def is_here(plan: RunPlan) -> bool:
    """Return True for the plan of this machine alone."""
    return {host.name for host in plan.hosts} <= {THIS_MACHINE, socket.gethostname()}


def plan_of(folder: RunFolder) -> RunPlan:
    """Return the plan of a run; raise UsageError for a folder without one."""
    try:
        return parsed_file(folder.plan, RunPlan, MOST_BYTES)
    except (OSError, Misshapen) as error:
        raise UsageError(f"{folder.path}: no run that a launcher started: {error}") from None


# -- what the hosts answer


class RunProcess(Shape, frozen=True):
    """One process of a run on a host."""

    pid: Annotated[int, between(0, 1 << 31)]
    scratch: Annotated[str, at_most(4096)]
    """The private folder of its agent, as the host names it; only that host gets it back."""


class RunListing(Shape, frozen=True):
    """Processes of a run on a host, and the interpreter that answers."""

    python: Annotated[str, at_most(4096)]
    processes: tuple[RunProcess, ...] = ()


@dataclass(frozen=True)
class HostProcesses:
    """What runs of a run on one host."""

    name: str
    transport: Transport | None
    python: str = ""
    """The interpreter that answered there."""
    processes: tuple[RunProcess, ...] = ()
    error: str = ""


def processes_of_all(run: ReachedRun) -> list[HostProcesses]:
    """Ask every host of the run what runs there."""

    def ask(pair: tuple[Host, Transport | Problem]) -> HostProcesses:
        host, transport = pair
        if isinstance(transport, Problem):
            raise transport
        with closing(RpcClient(transport, host.python or "")) as client:
            reply = client.call("processes", run=run.run.id[:SHORT_ID])  # of every attempt
            listing = client.parsed(reply, RunListing)
        return HostProcesses(host.label, transport, listing.python, listing.processes)

    def late(pair: tuple[Host, Transport | Problem]) -> Problem:
        label = pair[0].label
        seconds = f"{REPLY_SECONDS:g} s; is its home directory on a disk that is down?"
        run.silent[label] = HostUnreachable(f"{label}: does not answer within {seconds}")
        return run.silent[label]

    pairs = [
        (host, run.silent.get(host.label, transport))
        for host, transport in zip(run.hosts, run.transports, strict=True)
    ]
    outcomes = each(ask, pairs, REPLY_SECONDS, late)
    return [
        HostProcesses(host.label, None, error=_short_message(outcome, host))
        if isinstance(outcome, Problem)
        else outcome
        for host, outcome in zip(run.hosts, outcomes, strict=True)
    ]


def _short_message(error: Problem, host: Host) -> str:
    return one_line(str(error).partition("\n")[0].removeprefix(f"{host.label}: "))
