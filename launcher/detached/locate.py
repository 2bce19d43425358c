"""Reach the hosts of a run: of a detached one, that which controls it, among those that may."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rackrun.commandline.options import Positional
from rackrun.commands import called
from rackrun.errors import Problem, UsageError
from rackrun.launcher.detached.entries import Ending
from rackrun.launcher.detached.known_runs import hosts_of, keep
from rackrun.launcher.detached.replies import LiveRun, RunFacts
from rackrun.launcher.errors import AccessRefused, HostUnreachable
from rackrun.launcher.output.console import say
from rackrun.launcher.remote import run_manager
from rackrun.launcher.run.hosts import Host, hosts_named
from rackrun.launcher.run.job import RUN_ID
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.settings import ReachOptions
from rackrun.launcher.settings_file import read_settings
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.local import LocalTransport
from rackrun.launcher.transport.parallel import all_or_raise, each
from rackrun.launcher.transport.rpc import RpcClient
from rackrun.run_folder import RunFolder
from rackrun.runs import MOST_BYTES, Run, is_supervised
from rackrun.shapes import Misshapen, parsed_file, shaped
from rackrun.terminal import one_line

if TYPE_CHECKING:
    from rackrun.launcher.transport.ssh import Network

HOSTS_FILE = Path("hosts.txt")
RUN_BYTES = 4
"""Of the id of a detached run; that of an attached one has 16."""
REPLY_SECONDS = 20.0
"""For the reply to one request: a home directory whose file server is down never answers."""

T = TypeVar("T")

Reached = tuple[Host, Transport]
RunReply = tuple[Reached, RpcClient, RunFacts]
"""A host's facts about a run, and the client through which it can be asked again."""


@dataclass(frozen=True)
class RunOptions(ReachOptions):
    """Options that identify a run."""

    run: Positional[str] = ""
    """The run: ID, start of an ID, name, folder, or latest."""
    hosts: str = ""
    """Host file of the run, on a machine where it was not started."""
    host_list: str = ""
    """Hosts of the run instead of a host file (also: -H): gpu01,gpu[02-04]."""

    @property
    def name_hosts(self) -> bool:
        """Return True where the hosts were typed."""
        return bool(self.hosts or self.host_list)


@dataclass
class ReachedRun:
    """A run, its hosts, and what is known of it."""

    id: str
    network: Network
    hosts: Sequence[Host]
    host: Host
    """The first one, which has the controller of a detached run."""
    runs: str
    """The folder on this machine for its results."""
    name: str = ""
    resume: tuple[str, ...] = ()
    """The command that continues it, but for the name of its folder; empty where not known."""
    transport: Any = None
    client: Any = None
    facts: RunFacts = RunFacts()
    error: str = ""
    """Why the first host does not answer."""
    transports: Sequence[Transport | Problem] = ()
    """The hosts that are looked at."""
    silent: dict[str, Problem] = field(default_factory=dict)
    """Hosts on which not even a program starts in time, by label: they are not asked again."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the run's hosts."""
        return self.facts.summary.hosts if self.facts.summary else ()


@contextmanager
def reached(
    run: Run, options: RunOptions, need_controller: bool = True, need_hosts: bool = True
) -> Iterator[ReachedRun]:
    """Reach the hosts of a run, and its controller if it is a detached one.

    Of an attached run, `facts` are those of its folder on this machine; they are enough where no
    hosts are needed and none are known.
    """
    from rackrun.launcher.transport.ssh import (
        open_network,  # Fabric takes as long to import as --help may
    )

    record, hosts = run.record, _hosts_of(run, options, need_hosts)
    with ExitStack() as stack:
        network = open_network(options, record.ssh_config if record else "")
        stack.callback(network.close)
        reached_run = ReachedRun(
            run.asked,
            network,
            hosts,
            hosts[0] if hosts else Host(""),
            record.runs if record else "runs",
            run.name,
            record.resume if record else (),
        )
        if is_controlled(run, options):
            _find(reached_run, record is not None, need_controller)
        elif run.folder:
            reached_run.facts = facts_in(RunFolder(run.folder))
        if is_of_this_machine(run, options):
            reached_run.transports = [LocalTransport(host.label) for host in hosts]
        if reached_run.client is not None:
            stack.callback(reached_run.client.close)
        yield reached_run


def is_controlled(run: Run, options: RunOptions) -> bool:
    """Return True for a run that its hosts know: a controller there looks after it.

    An attached run has a launcher, and a folder on its machine, which shows how the run goes.
    """
    is_at_hosts = run.folder is None or run.record is not None or options.name_hosts
    return is_at_hosts and not is_attached(run.id)


def is_attached(run: str) -> bool:
    """Return True for the id of an attached run: --detach gives shorter ones."""
    return bool(re.fullmatch(RUN_ID, run))


def facts_in(folder: RunFolder) -> RunFacts:
    """Return the facts in the files of a run; raise UsageError for a folder without one."""
    plan_in(folder)
    live, ending = LiveRun(), None
    with suppress(OSError, Misshapen):
        ending = parsed_file(folder.result, Ending, MOST_BYTES)
    with suppress(Misshapen):
        live = shaped(run_manager.live_in(str(folder.path)), LiveRun, folder.live.name)
    return RunFacts(
        folder=str(folder.path),
        live=live,
        alive=ending is None and is_supervised(folder.plan),
        finish=ending,
        end=ending.exit_code if ending else None,
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


def _find(run: ReachedRun, is_remembered: bool, need_controller: bool) -> None:
    candidates = run.hosts[:1] if is_remembered else run.hosts
    pairs = list(zip(candidates, run.network.try_each(candidates), strict=True))
    started: set[str] = set()  # hosts that have answered a login and started Python
    outcomes = each_in_time(partial(_query, run.id, started), pairs)
    for (host, _), outcome in zip(pairs, outcomes, strict=True):
        if isinstance(outcome, TooLate) and host.label not in started:
            run.silent[host.label] = outcome
    errors = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    replies = [outcome for outcome in outcomes if not isinstance(outcome, Problem)]
    first = _reply_of_controller(replies)
    for _, client, _ in replies:
        if first is None or client is not first[1]:
            client.close()
    if first is not None:
        (run.host, run.transport), run.client, run.facts = first
        assert run.facts.summary is not None
        if run.id == run.facts.summary.name:  # only its hosts know which is meant
            say(f"run {run.facts.summary.run} ({one_line(run.id)})")
        run.id = run.facts.summary.run
        return
    if refusals := [reply.error for *_, reply in replies if reply.error]:
        raise UsageError(one_line(refusals[0]))
    if errors and is_remembered and not need_controller:
        run.error = short_message(errors[0], run.host)
        return
    raise _not_found(run, candidates, errors)


def _reply_of_controller(replies: Sequence[RunReply]) -> RunReply | None:
    # Hosts that share a home directory all know the run, whose controller is on its first host.
    knowing = [reply for reply in replies if reply[2].summary]
    for reply in knowing:
        (host, _), _, facts = reply
        if facts.summary and facts.summary.hosts[:1] == (host.label,):
            return reply
    return knowing[0] if knowing else None


def _query(run: str, started: set[str], pair: Reached) -> RunReply:
    host, transport = pair
    client = RpcClient(transport, run_manager, host.python or "")
    started.add(host.label)
    reply = client.parsed(client.call("find", run=run), RunFacts)
    if reply.summary and not (reply.summary.run.startswith(run) or reply.summary.name == run):
        raise HostUnreachable(
            f"{host.label}: was asked for run {run}, and answered for another one"
        )
    return pair, client, reply


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


def call_in_time(run: ReachedRun, work: Callable[[], T]) -> T:
    """Return the reply of the controller's host; raise TooLate after the time limit."""
    outcomes = each_in_time(lambda _: work(), [(run.host, run.transport)])
    return all_or_raise(outcomes)[0]


def _not_found(run: ReachedRun, candidates: Sequence[Host], errors: Sequence[Problem]) -> Problem:
    names = ", ".join(host.label for host in candidates)
    if not errors:
        return UsageError(f"no run {run.id} on {names}; {called('ps')} lists those known here")
    refused = [error for error in errors if isinstance(error, AccessRefused)]
    kind = AccessRefused if refused else HostUnreachable
    lines = [f"run {run.id} was not found: not every host answers", *map(str, errors)]
    return kind("\n".join(lines))


def _hosts_of(run: Run, options: RunOptions, need_hosts: bool) -> tuple[Host, ...]:
    """Return the hosts to ask: those that are typed, recorded, or in the host file here.

    Raises UsageError if none are known; of an attached run only where hosts are needed.
    """
    if options.name_hosts:
        return hosts_named(Path(options.hosts), options.host_list)
    if run.folder and is_of_this_machine(run, options):
        return tuple(Host(host.name) for host in plan_in(RunFolder(run.folder)).hosts)
    if run.record and (hosts := hosts_of(run.record)):
        keep(run.id)
        return hosts
    if not is_attached(run.id) and HOSTS_FILE.exists():
        return hosts_named(HOSTS_FILE, "")
    hint = "type: --hosts FILE, with the host file that it was started with"
    unknown = f"the hosts of run {run.asked} are not known here; {hint}"
    # `status` of an attached run has something to show without them: what is in its folder
    if need_hosts or run.folder is None or is_controlled(run, options):
        raise UsageError(unknown)
    say(unknown)
    return ()


def run_manager_on(transport: Transport, python: str | None) -> closing[RpcClient]:
    """Return a context with a client of the run manager on a host."""
    return closing(RpcClient(transport, run_manager, python or ""))


def short_message(error: Problem, host: Host) -> str:
    """Return the first line of an error, without the name of its host."""
    return one_line(str(error).partition("\n")[0].removeprefix(f"{host.label}: "))
