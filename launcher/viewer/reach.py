"""Reach the hosts of a run, to ask what is left there, or to end it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from rackrun.commandline.options import Positional
from rackrun.errors import Problem, UsageError
from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.output.console import say
from rackrun.launcher.run.hosts import THIS_MACHINE, Host
from rackrun.launcher.run.kept_hosts import hosts_in
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.settings import ReachOptions
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.local import LocalTransport
from rackrun.launcher.transport.parallel import each
from rackrun.launcher.transport.rpc import RpcClient
from rackrun.run_folder import RunFolder
from rackrun.runs import MOST_BYTES, Run
from rackrun.shapes import Misshapen, parsed_file
from rackrun.terminal import one_line

REPLY_SECONDS = 20.0
"""Time for the reply to one request: a home directory whose file server is down never answers."""

T = TypeVar("T")

Reached = tuple[Host, Transport]


@dataclass(frozen=True)
class RunOptions(ReachOptions):
    """The run."""

    run: Positional[str] = ""
    """The run: ID, start of an ID, name, folder, or latest."""


@dataclass
class ReachedRun:
    """A run, and its hosts."""

    run: Run
    hosts: Sequence[Host]
    transports: Sequence[Transport | Problem]
    silent: dict[str, Problem] = field(default_factory=dict)
    """Hosts on which not even a program starts in time, by label: they are not asked again."""


@contextmanager
def reached(run: Run, options: RunOptions, need_hosts: bool = True) -> Iterator[ReachedRun]:
    """Reach the hosts of a run, as its folder has them."""
    plan = plan_in(run.folder)
    known = hosts_in(run.folder)
    if known is None and is_here(plan):
        here = [Host(host.name) for host in plan.hosts]
        yield ReachedRun(run, here, [LocalTransport(host.name) for host in here])
        return
    if known is None:
        unknown = f"{run.folder.hosts}: names no hosts, or is not a file of yours"
        if need_hosts:
            raise UsageError(unknown)
        say(unknown)
        yield ReachedRun(run, (), ())
        return
    from rackrun.launcher.transport.ssh import open_network  # Fabric takes its time to import

    with closing(open_network(options, known.ssh_config)) as network:
        yield ReachedRun(run, known.hosts, network.try_each(known.hosts))


def is_here(plan: Plan) -> bool:
    """Return True for the plan of this machine alone."""
    return {host.name for host in plan.hosts} <= {THIS_MACHINE, socket.gethostname()}


def plan_in(folder: RunFolder) -> Plan:
    """Return the plan of a run; raise UsageError for a folder without one."""
    try:
        return parsed_file(folder.plan, Plan, MOST_BYTES)
    except (OSError, Misshapen) as error:
        raise UsageError(f"{folder.path}: no run that a launcher started: {error}") from None


def each_in_time(
    work: Callable[[Reached], T],
    pairs: Sequence[tuple[Host, Transport | Problem]],
    seconds: float = REPLY_SECONDS,
) -> list[T | Problem]:
    """Return the replies that come in time; the other hosts are too late, or cannot be reached."""

    def reply(pair: tuple[Host, Transport | Problem]) -> T:
        host, transport = pair
        if isinstance(transport, Problem):
            raise transport
        return work((host, transport))

    def late(pair: tuple[Host, Transport | Problem]) -> Problem:
        why = f"does not answer within {seconds:g} s; is its home directory on a disk that is down?"
        return TooLate(f"{pair[0].label}: {why}")

    return each(reply, pairs, seconds, late)


class TooLate(HostUnreachable):
    """A host that can be logged in to, and then does not answer."""


def processes_on(transport: Transport, python: str | None) -> closing[RpcClient]:
    """Return a context with a client of the program on a host, which lists processes."""
    return closing(RpcClient(transport, python or ""))


def short_message(error: Problem, host: Host) -> str:
    """Return the first line of an error, without the name of its host."""
    return one_line(str(error).partition("\n")[0].removeprefix(f"{host.label}: "))
