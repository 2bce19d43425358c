"""Find a detached run: the hosts that may know it, and the one that controls it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from launcher.detached.answers import RunAnswer, call
from launcher.detached.known_runs import KnownRun, recall
from launcher.errors import AccessRefused, HostUnreachable
from launcher.remote import run_manager
from launcher.run.hosts import Host, hosts_named
from launcher.run.job import RUN_ID
from launcher.run.settings import Positional
from launcher.transport.base import Transport
from launcher.transport.parallel import all_or_raise, each
from launcher.transport.rpc import RpcClient
from rackrun.commands import called
from rackrun.errors import Problem, UsageError
from rackrun.terminal import one_line

if TYPE_CHECKING:
    from launcher.transport.ssh import Network

HOSTS_FILE = Path("hosts.txt")
RUN_BYTES = 4
"""Of the id of a detached run; that of an attached one has 16."""
ANSWER_SECONDS = 20.0
"""For the answer to one request: a home directory whose file server is down never answers."""

T = TypeVar("T")


@dataclass(frozen=True)
class ReachOptions:
    """Options for reaching hosts."""

    ssh_config: str = ""
    """ssh_config file to use instead of your own and the system's."""
    accept_new: bool = False
    """Add unknown host keys to known_hosts; changed keys are still refused."""


@dataclass(frozen=True)
class RunOptions(ReachOptions):
    """Options that identify a run."""

    run: Positional[str] = ""
    """ID of the run, its first characters, or its name."""
    hosts: str = ""
    """Host file of the run, on a machine where it was not started."""
    host_list: str = ""
    """Hosts of the run instead of a host file (also: -H): gpu01,gpu[02-04]."""


@dataclass
class DetachedRun:
    """A run, and the first host of it."""

    run: str
    network: Network
    hosts: Sequence[Host]
    host: Host
    runs: str
    resume: tuple[str, ...] = ()
    """The command that continues it, but for the name of its folder; empty where not known."""
    place: Any = None
    client: Any = None
    found: RunAnswer = RunAnswer()
    """What its first host knows of the run; nothing of one that was attached."""
    error: str = ""
    """Why the first host does not answer."""
    places: Sequence[Transport | Problem] = ()
    """The hosts that are looked at."""
    silent: dict[str, Problem] = field(default_factory=dict)
    """Hosts on which not even a program starts in time, by label: they are not asked again."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the run's hosts."""
        return self.found.summary.hosts if self.found.summary else ()


@contextmanager
def reached(
    options: RunOptions,
    need_controller: bool = True,
    need_record: bool = True,
    known: tuple[str, KnownRun | None] | None = None,
) -> Iterator[DetachedRun]:
    """Find the run, and its controller if it is a detached one.

    `known` is what was written down here about it, if that has been read already.
    """
    run, memo = known or recall(options.run)
    was_attached = is_attached(run)
    if was_attached and need_record:
        raise UsageError(f"run {run} was attached and is over; type: {called('stop')} {run}")
    hosts = _hosts_of(options, run, memo)
    network = open_network(options.ssh_config or (memo.ssh_config if memo else ""), options)
    with ExitStack() as stack:
        stack.callback(network.close)
        there = DetachedRun(run, network, hosts, hosts[0], memo.runs if memo else "runs")
        there.resume = memo.resume if memo else ()
        if not was_attached:
            _find(there, memo is not None, need_controller)
        if there.client is not None:
            stack.callback(there.client.close)
        yield there


def is_attached(run: str) -> bool:
    """Return True for the id of an attached run: --detach gives shorter ones."""
    return bool(re.fullmatch(RUN_ID, run))


def open_network(config: str, options: ReachOptions) -> Network:
    """Return a network by an ssh_config file, or by the default ones."""
    from launcher.transport.ssh import (  # Fabric takes as long to import as --help may
        ConnectSettings,
        Network,
    )

    return Network(
        ConnectSettings(config=Path(config) if config else None, accept_new=options.accept_new)
    )


def _find(there: DetachedRun, is_remembered: bool, need_controller: bool) -> None:
    """Ask the first host for the run; ask all hosts where nothing was written down here."""
    candidates = there.hosts[:1] if is_remembered else there.hosts
    pairs = list(zip(candidates, there.network.try_each(candidates), strict=True))
    started: set[str] = set()
    answers = each_in_time(partial(_query, there.run, started), pairs)
    for (host, _), answer in zip(pairs, answers, strict=True):
        if isinstance(answer, TooLate) and host.label not in started:
            there.silent[host.label] = answer
    errors = [answer for answer in answers if isinstance(answer, Problem)]
    met = [answer for answer in answers if not isinstance(answer, Problem)]
    first = min((one for one in met if one[2].summary), key=_is_not_first, default=None)
    for _, client, _ in met:
        if first is None or client is not first[1]:
            client.close()
    if first is not None:
        (there.host, there.place), there.client, there.found = first
        assert there.found.summary is not None
        there.run = there.found.summary.run
        return
    if said := [found.error for *_, found in met if found.error]:
        raise UsageError(one_line(said[0]))
    if errors and is_remembered and not need_controller:
        there.error = short_message(errors[0], there.host)
        return
    raise _not_found(there, candidates, errors)


Reached = tuple[Host, Transport]
Asked = tuple[Host, Transport | Problem]


def _query(run: str, started: set[str], pair: Asked) -> tuple[Reached, RpcClient, RunAnswer]:
    """Return a host's facts about the run, and the client of its run manager."""
    host, place = pair
    if isinstance(place, Problem):
        raise place
    client = RpcClient(place, run_manager, host.python or "")
    started.add(host.label)
    found = call(host.label, client, RunAnswer, "find", run=run)
    if found.summary and not (found.summary.run.startswith(run) or found.summary.name == run):
        raise HostUnreachable(
            f"{host.label}: was asked for run {run}, and answered for another one"
        )
    return (host, place), client, found


def _is_not_first(answer: tuple[Reached, RpcClient, RunAnswer]) -> bool:
    """Return True for a host that knows a run but does not control it: homes may be shared."""
    (host, _), _, found = answer
    return found.summary is not None and host.label != found.summary.hosts[0]


def each_in_time(
    work: Callable[[Asked], T], pairs: Sequence[Asked], seconds: float = ANSWER_SECONDS
) -> list[T | Problem]:
    """Return the answers that come in time; the other hosts are too late."""

    def late(pair: Asked) -> Problem:
        why = f"does not answer within {seconds:g} s; is its home directory on a disk that is down?"
        return TooLate(f"{pair[0].label}: {why}")

    return each(work, pairs, seconds, late)


class TooLate(HostUnreachable):
    """A host that can be logged in to, and then does not answer."""


def call_in_time(there: DetachedRun, work: Callable[[], T]) -> T:
    """Return the answer of the controller's host; raise TooLate after the time limit."""
    outcomes = each_in_time(lambda _: work(), [(there.host, there.place)])
    return all_or_raise(outcomes)[0]


def _not_found(
    there: DetachedRun, candidates: Sequence[Host], errors: Sequence[Problem]
) -> Problem:
    """Return the message for a run that no host knows."""
    names = ", ".join(host.label for host in candidates)
    if not errors:
        return UsageError(f"no run {there.run} on {names}; --detach printed its id")
    refused = [error for error in errors if isinstance(error, AccessRefused)]
    kind = AccessRefused if refused else HostUnreachable
    lines = [f"run {there.run} was not found: not every host answers", *map(str, errors)]
    return kind("\n".join(lines))


def _hosts_of(options: RunOptions, run: str, memo: KnownRun | None) -> tuple[Host, ...]:
    """Return the hosts to ask; an attached run may be on others than those of this folder."""
    may_be_here = not memo and not is_attached(run) and HOSTS_FILE.exists()
    if options.host_list or options.hosts or may_be_here:
        return hosts_named(Path(options.hosts or HOSTS_FILE), options.host_list)
    if memo:
        return memo.hosts
    hint = "type: --hosts FILE, with the host file that it was started with"
    raise UsageError(f"the hosts of run {options.run} are not known here; {hint}")


@contextmanager
def run_manager_on(place: Transport, python: str | None) -> Iterator[RpcClient]:
    """Yield a client of the run manager on a host, closed afterwards."""
    client = RpcClient(place, run_manager, python or "")
    try:
        yield client
    finally:
        client.close()


def short_message(error: Problem, host: Host) -> str:
    """Return the first line of an error, without the name of its host."""
    return one_line(str(error).partition("\n")[0].removeprefix(f"{host.label}: "))
