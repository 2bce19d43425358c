"""Reach the hosts of a run, to ask what is left there, or to end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rackrun.commandline.options import Positional
from rackrun.errors import Problem, UsageError
from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.output.console import say
from rackrun.launcher.output.run_view import read_view
from rackrun.launcher.remote import run_processes
from rackrun.launcher.run.hosts import Host, hosts_named
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.settings import ReachOptions
from rackrun.launcher.settings_file import read_settings
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.local import LocalTransport
from rackrun.launcher.transport.parallel import each
from rackrun.launcher.transport.rpc import RpcClient
from rackrun.launcher.viewer.known_runs import hosts_of, keep
from rackrun.launcher.viewer.replies import Ending, RunFacts
from rackrun.run_folder import RunFolder
from rackrun.runs import MOST_BYTES, SHORT_ID, Run, is_supervised
from rackrun.shapes import Misshapen, parsed_file
from rackrun.terminal import one_line

REPLY_SECONDS = 20.0
"""For the reply to one request: a home directory whose file server is down never answers."""

T = TypeVar("T")

Reached = tuple[Host, Transport]


@dataclass(frozen=True)
class RunOptions(ReachOptions):
    """Options that identify a run."""

    run: Positional[str] = ""
    """The run: ID, start of an ID, name, folder, or latest."""
    hosts: str = ""
    """Ask the hosts of this host file, on a machine where the run was not started."""
    host_list: str = ""
    """Ask these hosts instead of a host file (also: -H): gpu01,gpu[02-04]."""

    @property
    def name_hosts(self) -> bool:
        """Return True where the hosts were typed."""
        return bool(self.hosts or self.host_list)


@dataclass
class ReachedRun:
    """A run, its hosts, and what is known of it."""

    id: str
    name: str
    hosts: Sequence[Host]
    transports: Sequence[Transport | Problem]
    facts: RunFacts = RunFacts()
    silent: dict[str, Problem] = field(default_factory=dict)
    """Hosts on which not even a program starts in time, by label: they are not asked again."""


@contextmanager
def reached(run: Run, options: RunOptions, need_hosts: bool = True) -> Iterator[ReachedRun]:
    """Reach the hosts of a run; its folder, where it is here, has facts about it."""
    from rackrun.launcher.transport.ssh import (
        open_network,  # Fabric takes as long to import as --help may
    )

    hosts = _hosts_of(run, options, need_hosts)
    facts = facts_in(RunFolder(run.folder)) if run.folder else RunFacts()
    if is_of_this_machine(run, options):
        here = [LocalTransport(host.label) for host in hosts]
        yield ReachedRun(run.id, run.name, hosts, here, facts)
        return
    with closing(open_network(options, run.record.ssh_config if run.record else "")) as network:
        yield ReachedRun(run.id, run.name, hosts, network.try_each(hosts), facts)


def facts_in(folder: RunFolder) -> RunFacts:
    """Return the facts in the files of a run; raise UsageError for a folder without one."""
    plan_in(folder)
    ending = None
    with suppress(OSError, Misshapen):
        ending = parsed_file(folder.result, Ending, MOST_BYTES)
    return RunFacts(
        folder=str(folder.path),
        live=read_view(folder),
        alive=ending is None and is_supervised(folder),
        finish=ending,
    )


def plan_in(folder: RunFolder) -> Plan:
    """Return the plan of a run; raise UsageError for a folder without one."""
    try:
        return parsed_file(folder.plan, Plan, MOST_BYTES)
    except (OSError, Misshapen) as error:
        raise UsageError(f"{folder.path}: no run that a launcher started: {error}") from None


def is_of_this_machine(run: Run, options: RunOptions) -> bool:
    """Return True for a run of `./run-local`."""
    if run.folder is None or options.name_hosts:
        return False
    with suppress(UsageError):
        return read_settings(RunFolder(run.folder).settings).launch == "local"
    return False


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


def _hosts_of(run: Run, options: RunOptions, need_hosts: bool) -> tuple[Host, ...]:
    """Return the hosts to ask: those that are typed or recorded, or this machine.

    Raises UsageError if none are known and hosts are needed.
    """
    if options.name_hosts:
        return hosts_named(Path(options.hosts), options.host_list)
    if run.folder and is_of_this_machine(run, options):
        return tuple(Host(host.name) for host in plan_in(RunFolder(run.folder)).hosts)
    if run.record and (hosts := hosts_of(run.record)):
        keep(run.id[:SHORT_ID])
        return hosts
    hint = "type: --hosts FILE, with the host file that it was started with"
    unknown = f"the hosts of run {run.id} are not known here; {hint}"
    if need_hosts or run.folder is None:
        raise UsageError(unknown)
    say(unknown)
    return ()


def processes_on(transport: Transport, python: str | None) -> closing[RpcClient]:
    """Return a context with a client of the program that lists processes on a host."""
    return closing(RpcClient(transport, run_processes, python or ""))


def short_message(error: Problem, host: Host) -> str:
    """Return the first line of an error, without the name of its host."""
    return one_line(str(error).partition("\n")[0].removeprefix(f"{host.label}: "))
