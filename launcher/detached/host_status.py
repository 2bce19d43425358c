"""The processes and files of a run, as found on its hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from launcher.detached.answers import RunListing, RunProcess, call
from launcher.detached.locate import (
    Asked,
    DetachedRun,
    TooLate,
    each_in_time,
    run_manager_on,
    short_message,
)
from launcher.transport.base import Transport
from rackrun.errors import Problem


@dataclass(frozen=True)
class HostStatus:
    """Findings on one host."""

    name: str
    place: Transport | None
    python: str = ""
    """The interpreter that answered there."""
    processes: tuple[RunProcess, ...] = ()
    """Those of the run, with what each is there for."""
    error: str = ""


def status_of_all(there: DetachedRun) -> list[HostStatus]:
    """Ask every host of the run what runs there."""
    hosts = [host for host in there.hosts if host.label in (there.labels or (host.label,))]
    if not there.places:
        there.places = there.network.try_each(hosts)
    pairs = [
        (host, there.silent.get(host.label, place))
        for host, place in zip(hosts, there.places, strict=True)
    ]
    answers = each_in_time(partial(_status_of, there.run), pairs)
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, TooLate):
            there.silent[host.label] = answer
    looked = [
        HostStatus(host.label, None, error=short_message(answer, host))
        if isinstance(answer, Problem)
        else answer
        for host, answer in zip(hosts, answers, strict=True)
    ]
    return _without_duplicates(there, looked)


def _status_of(run: str, pair: Asked) -> HostStatus:
    """Return the answer of one host."""
    host, place = pair
    if isinstance(place, Problem):
        raise place
    with run_manager_on(place, host.python) as client:
        found = call(host.label, client, RunListing, "processes", run=run)
    return HostStatus(host.label, place, found.python, found.processes)


def _without_duplicates(there: DetachedRun, looked: Sequence[HostStatus]) -> list[HostStatus]:
    """Of hosts that are one machine, each with its own processes only."""
    state = there.found.state
    names = [host.name for host in state.hosts]
    scratch = f"/tmp/rackrun-{state.run_id}"
    owners: dict[str, str] = {f"{scratch}-{node}": name for node, name in enumerate(names)}

    def owner(process: RunProcess, default: str) -> str:
        if process.role == "keeper":
            return there.host.label
        return owners.get(process.scratch, default)

    return [
        replace(
            host, processes=tuple(p for p in host.processes if owner(p, host.name) == host.name)
        )
        for host in looked
    ]
