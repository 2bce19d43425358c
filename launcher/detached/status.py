"""`./run-ssh status RUN-ID`: show which processes of a run exist on every host."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from launcher.detached.answers import ReportedHost, RunListing, RunProcess, call
from launcher.detached.locate import (
    Asked,
    DetachedRun,
    RunOptions,
    TooLate,
    each_in_time,
    reached,
    run_manager_on,
    short_message,
)
from launcher.errors import HostUnreachable
from launcher.run.host_names import grouped
from launcher.transport.base import Transport
from rackrun.errors import Problem
from rackrun.tables import table
from rackrun.terminal import one_line
from rackrun.units import duration, plural

EARLIER = ("", "connecting", "starting")  # a controller may still report these when ranks run
HEAD = ("hosts", "state", "step", "since", "last heard", "processes")
HEARTBEAT = ("heard_seconds_ago", "lease_seconds")


@dataclass(frozen=True)
class StatusOptions(RunOptions):
    """Options of `./run-ssh status`."""

    json: bool = False
    """Print it as JSON."""


def status(options: StatusOptions) -> int:
    """Print which processes of the run exist on every host."""
    with reached(options, need_controller=False) as there:
        hosts = status_of_all(there)
    found = report(there, hosts)
    sys.stdout.write(f"{json.dumps(found, indent=2)}\n" if options.json else describe(found))
    return HostUnreachable.exit_code if there.error else 0


# -- the hosts


@dataclass(frozen=True)
class HostStatus:
    """Findings on one host."""

    name: str
    place: Transport | None
    python: str = ""
    """The interpreter that answered there."""
    processes: tuple[RunProcess, ...] = ()
    """The processes of the run, each with its role."""
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
    found = [
        HostStatus(host.label, None, error=short_message(answer, host))
        if isinstance(answer, Problem)
        else answer
        for host, answer in zip(hosts, answers, strict=True)
    ]
    return _without_duplicates(there, found)


def _status_of(run: str, pair: Asked) -> HostStatus:
    """Return the answer of one host."""
    host, place = pair
    if isinstance(place, Problem):
        raise place
    with run_manager_on(place, host.python) as client:
        found = call(host.label, client, RunListing, "processes", run=run)
    return HostStatus(host.label, place, found.python, found.processes)


def _without_duplicates(there: DetachedRun, hosts: Sequence[HostStatus]) -> list[HostStatus]:
    """Return the hosts, with each process at one of them: several may be the same machine."""
    state = there.found.state
    names = [host.name for host in state.hosts]
    scratch = f"/tmp/rackrun-{state.run_id}"
    owners: dict[str, str] = {f"{scratch}-{node}": name for node, name in enumerate(names)}

    def owner(process: RunProcess, default: str) -> str:
        if process.role == "controller":
            return there.host.label
        return owners.get(process.scratch, default)

    return [
        replace(
            host, processes=tuple(p for p in host.processes if owner(p, host.name) == host.name)
        )
        for host in hosts
    ]


# -- the report


def report(there: DetachedRun, hosts: Sequence[HostStatus]) -> dict[str, Any]:
    """Return all that is known, as `--json` prints it."""
    found, finish = there.found, there.found.finish
    known = {host.name: host for host in found.state.hosts}
    controller = {"host": there.host.label, "alive": found.alive, "error": there.error}
    return {
        "run": there.run,
        "name": found.summary.name if found.summary else "",
        "controller": {**controller, "stopped": found.stopped},
        "exit_code": found.end,
        "error": found.error,
        "verdict": finish.verdict if finish else "",
        "cause": finish.cause if finish else "",
        "folder": found.state.folder,
        "seconds": found.state.seconds,
        "hosts": [_host_report(host, known.get(host.name, ReportedHost())) for host in hosts],
    }


def _host_report(host: HostStatus, known: ReportedHost) -> dict[str, Any]:
    """Return what runs on one host, and the last reports of its ranks."""
    steps = list(known.steps.values()) or [0]
    agents = [process.known for process in host.processes if process.role == "agent"]
    ranks = [process for process in host.processes if process.role == "rank"]
    return {
        "name": host.name,
        "error": host.error,
        "state": _state_of(host, bool(ranks), known),
        "step": min(steps) if ranks and known.phases else None,
        "phases": known.phases if ranks else (),
        "seconds": max((process.seconds for process in ranks), default=None),
        "heartbeat": {name: agents[0].get(name, 0.0) for name in HEARTBEAT} if agents else None,
        "processes": [process.known for process in host.processes],
    }


def _state_of(host: HostStatus, has_ranks: bool, known: ReportedHost) -> str:
    """Return the state of a host: by its processes first, by its controller second."""
    if host.error:
        return "not reached"
    if has_ranks:
        return known.state if known.state not in EARLIER else "running"
    busy = [process for process in host.processes if process.role != "controller"]
    return "starting or stopping" if busy else "stopped"


def describe(found: dict[str, Any]) -> str:
    """Return the report as text, with hosts that are alike in one row."""
    controller = found["controller"]
    lines = [f"run {found['run']} {one_line(found['name'])}: {_headline(found)}"]
    if found["folder"]:
        lines.append(f"folder {one_line(found['folder'])} on {controller['host']}")
    alike: dict[tuple[str, ...], list[str]] = {}
    for host in found["hosts"]:
        alike.setdefault(_cells(host), []).append(one_line(host["name"]))
    rows = [(grouped(names), *cells) for cells, names in alike.items()]
    drawn = table(HEAD, rows, ("hosts", "state", "processes"), ("step", "since", "last heard"))
    return "\n".join([*lines, "", drawn, f"{_verdict(found['hosts'])}\n"])


def _verdict(hosts: Sequence[dict[str, Any]]) -> str:
    """Return how many hosts are in which state, and which of them do not answer."""
    states = Counter(one_line(host["state"]) for host in hosts)
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    silent = [one_line(host["name"]) for host in hosts if host["error"]]
    return f"{plural(len(hosts), 'host')}: {counted}" + f" ({grouped(silent)})" * bool(silent)


def _headline(found: dict[str, Any]) -> str:
    """Return the state of the run, in words."""
    controller = found["controller"]
    if controller["error"]:
        return f"its controller's host does not answer: {controller['error']}"
    if controller["stopped"]:
        number = controller["stopped"]
        return f"suspended: its controller on {controller['host']} (process {number}) was stopped"
    if controller["alive"]:
        seconds = found["seconds"]
        since = "" if seconds is None else f" for {duration(seconds)}"
        return f"running{since}, supervised from {controller['host']}"
    if found["exit_code"] is None:
        return f"its controller on {controller['host']} is gone; its hosts end it on their own"
    why = found["error"] or found["cause"]
    return f"ended with {found['exit_code']}: {one_line(why)}"


def _cells(host: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table, after the name."""
    if host["error"]:
        return (f"not reached: {one_line(host['error'])}", "", "", "", "")
    counts: dict[str, int] = {}
    for process in host["processes"]:
        counts[process["role"]] = counts.get(process["role"], 0) + 1
    names = ", ".join(role if n == 1 else f"{n} x {role}" for role, n in counts.items())
    heartbeat = host["heartbeat"]
    heard = f"{heartbeat['heard_seconds_ago']:.0f} s ago" if heartbeat else "-"
    since = "-" if host["seconds"] is None else duration(host["seconds"])
    step = "-" if host["step"] is None else f"{host['step']:,}"
    return one_line(host["state"]), step, since, heard, names or "none"
