"""`./run-ssh status RUN-ID`: what really runs on every host."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.detached.answers import ReportedHost
from launcher.detached.host_status import HostStatus, status_of_all
from launcher.detached.locate import DetachedRun, RunOptions, reached
from launcher.errors import HostUnreachable
from launcher.run.host_names import grouped
from rackrun.tables import table
from rackrun.terminal import one_line
from rackrun.units import duration, plural

EARLIER = ("", "connecting", "starting")  # what a keeper may still say of a host whose ranks run
HEAD = ("hosts", "state", "step", "since", "last heard", "processes")
SHOWN_ROLES = {"keeper": "controller", "outpost": "relay"}
LEASE = ("heard_seconds_ago", "lease_seconds")


@dataclass(frozen=True)
class StatusOptions(RunOptions):
    """Options of `./run-ssh status`."""

    json: bool = False
    """Print it as JSON."""


def status(options: StatusOptions) -> int:
    """Print what really runs on every host."""
    with reached(options, need_keeper=False) as there:
        hosts = status_of_all(there)
    told = report(there, hosts)
    sys.stdout.write(f"{json.dumps(told, indent=2)}\n" if options.json else describe(told))
    return HostUnreachable.exit_code if there.error else 0


def report(there: DetachedRun, hosts: Sequence[HostStatus]) -> dict[str, Any]:
    """All that is known, as `--json` has it."""
    found, finish = there.found, there.found.finish
    known = {host.name: host for host in found.state.hosts}
    keeper = {"host": there.host.label, "alive": found.alive, "error": there.error}
    return {
        "run": there.run,
        "name": found.card.name if found.card else "",
        "controller": {**keeper, "stopped": found.stopped},
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
    agents = [process.told for process in host.processes if process.role == "agent"]
    ranks = [process for process in host.processes if process.role == "rank"]
    return {
        "name": host.name,
        "error": host.error,
        "state": _state_of(host, bool(ranks), known),
        "step": min(steps) if ranks and known.phases else None,
        "phases": known.phases if ranks else (),
        "seconds": max((process.seconds for process in ranks), default=None),
        "lease": {name: agents[0].get(name, 0.0) for name in LEASE} if agents else None,
        "processes": [process.told for process in host.processes],
    }


def _state_of(host: HostStatus, has_ranks: bool, known: ReportedHost) -> str:
    """Return what a host is doing: by its processes first, by its controller second."""
    if host.error:
        return "not reached"
    if has_ranks:
        return known.state if known.state not in EARLIER else "running"
    busy = [process for process in host.processes if process.role != "keeper"]
    return "starting or ending" if busy else "stopped"


def describe(told: dict[str, Any]) -> str:
    """The same for people."""
    keeper = told["controller"]
    lines = [f"run {told['run']} {one_line(told['name'])}: {_headline(told)}"]
    if told["folder"]:
        lines.append(f"folder {one_line(told['folder'])} on {keeper['host']}")
    alike: dict[tuple[str, ...], list[str]] = {}
    for host in told["hosts"]:
        alike.setdefault(_cells(host), []).append(one_line(host["name"]))
    rows = [(grouped(names), *cells) for cells, names in alike.items()]
    drawn = table(HEAD, rows, ("hosts", "state", "processes"), ("step", "since", "last heard"))
    return "\n".join([*lines, "", drawn, f"{_verdict(told['hosts'])}\n"])


def _verdict(hosts: Sequence[dict[str, Any]]) -> str:
    """Return how many hosts are in which state, and which of them do not answer."""
    states = Counter(one_line(host["state"]) for host in hosts)
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    silent = [one_line(host["name"]) for host in hosts if host["error"]]
    return f"{plural(len(hosts), 'host')}: {counted}" + f" ({grouped(silent)})" * bool(silent)


def _headline(told: dict[str, Any]) -> str:
    """In which state the run is."""
    keeper = told["controller"]
    if keeper["error"]:
        return f"its controller's host does not answer: {keeper['error']}"
    if keeper["stopped"]:
        number = keeper["stopped"]
        return f"suspended: its controller on {keeper['host']} (process {number}) was stopped"
    if keeper["alive"]:
        seconds = told["seconds"]
        since = "" if seconds is None else f" for {duration(seconds)}"
        return f"running{since}, supervised from {keeper['host']}"
    if told["exit_code"] is None:
        return f"its controller on {keeper['host']} is gone; the hosts end it by themselves"
    why = told["error"] or told["cause"]
    return f"ended with {told['exit_code']}: {one_line(why)}"


def _cells(host: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table, after the name."""
    if host["error"]:
        return (f"not reached: {one_line(host['error'])}", "", "", "", "")
    counts: dict[str, int] = {}
    for process in host["processes"]:
        role = SHOWN_ROLES.get(process["role"], process["role"])
        counts[role] = counts.get(role, 0) + 1
    names = ", ".join(role if n == 1 else f"{n} x {role}" for role, n in counts.items())
    lease = host["lease"]
    heard = f"{lease['heard_seconds_ago']:.0f} s ago" if lease else "-"
    since = "-" if host["seconds"] is None else duration(host["seconds"])
    step = "-" if host["step"] is None else f"{host['step']:,}"
    return one_line(host["state"]), step, since, heard, names or "none"
