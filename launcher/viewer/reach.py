"""Reach the hosts of a run, and ask them which of its processes are there."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
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


class RunProcess(Shape, frozen=True):
    """One process of a run on a host."""

    pid: Annotated[int, between(0, 1 << 31)]
    scratch: Annotated[str, at_most(4096)]
    """The private folder of its agent, as the host names it; only that host gets it back."""


class RunListing(Shape, frozen=True):
    """Processes of a run on a host, and the interpreter that answers."""

    python: Annotated[str, at_most(4096)]
    processes: tuple[RunProcess, ...] = ()


@dataclass
class ReachedHost:
    """A host of a run, and what runs of it there."""

    host: Host
    transport: Transport | Problem
    """The way there, or why there is none: a host that once did not answer is not asked again."""
    listing: RunListing = RunListing("")
    error: str = ""
    """Why it has not said what runs there."""


@contextmanager
def reached(run: Run, options: ReachOptions) -> Iterator[list[ReachedHost]]:
    """Reach the hosts of a run, as its folder has them."""
    plan = plan_of(run.folder)
    known = hosts_in(run.folder)
    if known is None and is_here(plan):
        yield [ReachedHost(Host(host.name), LocalTransport(host.name)) for host in plan.hosts]
        return
    if known is None and is_of_scheduler(plan):
        raise UsageError(
            f"run {run.id} was started node by node, and cannot be reached from here: end it as the"
            " job that it is, in Slurm by scancel JOB, which leaves time for a checkpoint"
        )
    if known is None:
        raise UsageError(f"{run.folder.hosts}: names no hosts, or is not a file of yours")
    from rackrun.launcher.transport.ssh import open_network  # Fabric takes its time to import

    with closing(open_network(options, known.ssh_config)) as network:
        yield list(map(ReachedHost, known.hosts, network.try_each(known.hosts)))


def is_here(plan: RunPlan) -> bool:
    """Return True for the plan of this machine alone."""
    return {host.name for host in plan.hosts} <= {THIS_MACHINE, socket.gethostname()}


def is_of_scheduler(plan: RunPlan) -> bool:
    """Return True for a node's part of a run, whose launchers a scheduler has started."""
    return any(host.signalled_together for host in plan.hosts)


def plan_of(folder: RunFolder) -> RunPlan:
    """Return the plan of a run; raise UsageError for a folder without one."""
    try:
        return parsed_file(folder.plan, RunPlan, MOST_BYTES)
    except (OSError, Misshapen) as error:
        raise UsageError(f"{folder.path}: no run that a launcher started: {error}") from None


def look_for(run: Run, hosts: Sequence[ReachedHost]) -> None:
    """Ask every host what runs there of any attempt of a run."""

    def ask(one: ReachedHost) -> RunListing:
        if isinstance(one.transport, Problem):
            raise one.transport
        with closing(RpcClient(one.transport, one.host.python or "")) as client:
            return client.parsed(client.call("processes", run=run.id[:SHORT_ID]), RunListing)

    def late(one: ReachedHost) -> Problem:
        seconds = f"{REPLY_SECONDS:g} s; is its home directory on a disk that is down?"
        one.transport = HostUnreachable(f"{one.host.label}: does not answer within {seconds}")
        return one.transport

    for one, listing in zip(hosts, each(ask, hosts, REPLY_SECONDS, late), strict=True):
        if isinstance(listing, Problem):
            reason = str(listing).partition("\n")[0].removeprefix(f"{one.host.label}: ")
            one.listing, one.error = RunListing(""), one_line(reason)
        else:
            one.listing, one.error = listing, ""
