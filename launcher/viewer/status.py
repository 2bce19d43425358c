"""`status RUN`: show which processes of a run exist on every host."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from rackrun.commandline.options import Examples
from rackrun.errors import Problem
from rackrun.launcher.output.run_view import HostView, read_view
from rackrun.launcher.remote.files import SCRATCH
from rackrun.launcher.run.host_names import grouped
from rackrun.launcher.run.result import ending_in
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.viewer.reach import (
    Reached,
    ReachedRun,
    RunOptions,
    TooLate,
    each_in_time,
    processes_on,
    reached,
    short_message,
)
from rackrun.launcher.viewer.replies import RunListing, RunProcess
from rackrun.runs import SHORT_ID, Run
from rackrun.tables import table
from rackrun.terminal import one_line
from rackrun.units import duration, plural

EARLIER = ("connecting", "starting")  # the folder may still say these when ranks run
HEAD = ("hosts", "state", "step", "since", "last heard", "processes")
HEARTBEAT = ("heard_seconds_ago", "lease_seconds")


@dataclass(frozen=True)
class StatusOptions(RunOptions):
    """Show the processes of a run on every host."""

    examples: ClassVar[Examples] = (
        ("{prog} 3fa8", "the run whose ID begins with 3fa8"),
        ("{prog} --json 3fa8", "as JSON"),
    )

    json: bool = False
    """Print the result as JSON."""


def status(run: Run, options: StatusOptions) -> int:
    """Print how the run goes, and which of its processes exist on every host."""
    with reached(run, options, need_hosts=False) as reached_run:
        hosts = status_of_all(reached_run)
    report = report_of(reached_run, hosts)
    sys.stdout.write(f"{json.dumps(report, indent=2)}\n" if options.json else describe(report))
    return 0


# -- the hosts


@dataclass(frozen=True)
class HostStatus:
    """What runs on one host."""

    name: str
    transport: Transport | None
    python: str = ""
    """The interpreter that answered there."""
    processes: tuple[RunProcess, ...] = ()
    """The processes of the run, each with its role."""
    error: str = ""


def status_of_all(run: ReachedRun) -> list[HostStatus]:
    """Ask every host of the run what runs there."""
    hosts = run.hosts
    pairs = [
        (host, run.silent.get(host.label, transport))
        for host, transport in zip(hosts, run.transports, strict=True)
    ]
    ask = partial(_status_of, run.run.id[:SHORT_ID])  # of every attempt
    outcomes = each_in_time(ask, pairs)
    for host, outcome in zip(hosts, outcomes, strict=True):
        if isinstance(outcome, TooLate):
            run.silent[host.label] = outcome
    statuses = [
        HostStatus(host.label, None, error=short_message(outcome, host))
        if isinstance(outcome, Problem)
        else outcome
        for host, outcome in zip(hosts, outcomes, strict=True)
    ]
    return _without_duplicates(run, statuses)


def _status_of(run_id: str, pair: Reached) -> HostStatus:
    host, transport = pair
    with processes_on(transport, host.python) as client:
        listing = client.parsed(client.call("processes", run=run_id), RunListing)
    return HostStatus(host.label, transport, listing.python, listing.processes)


def _without_duplicates(run: ReachedRun, hosts: Sequence[HostStatus]) -> list[HostStatus]:
    # Several hosts may be one machine, and then each of them lists the processes of all.
    live = read_view(run.run.folder)
    if live is None:
        return list(hosts)
    owners = {f"{SCRATCH}{live.run_id}-{host.node}": host.name for host in live.hosts}

    def owner(process: RunProcess, default: str) -> str:
        return owners.get(process.scratch, default)

    return [
        replace(
            host, processes=tuple(p for p in host.processes if owner(p, host.name) == host.name)
        )
        for host in hosts
    ]


# -- the report


def report_of(run: ReachedRun, hosts: Sequence[HostStatus]) -> dict[str, Any]:
    """Return all that is known, as `--json` prints it."""
    folder = run.run.folder
    view, ending = read_view(folder), ending_in(folder)
    live = {host.name: host for host in view.hosts} if view else {}
    seconds = view.seconds if view else None
    return {
        "run": run.run.id,
        "name": run.run.name,
        "supervised": not run.run.is_over,
        "exit_code": ending.exit_code if ending else None,
        "verdict": ending.verdict if ending else "",
        "cause": ending.cause if ending else "",
        "folder": str(folder.path),
        "seconds": ending.seconds if ending else seconds,
        "hosts": [_host_report(host, live.get(host.name)) for host in hosts],
    }


def _host_report(host: HostStatus, live: HostView | None) -> dict[str, Any]:
    agents = [process.facts for process in host.processes if process.role == "agent"]
    ranks = [process for process in host.processes if process.role == "rank"]
    return {
        "name": host.name,
        "error": host.error,
        "state": _state_of(host, bool(ranks), live),
        "step": live.step or None if live and ranks else None,
        "seconds": max((process.seconds for process in ranks), default=None),
        "heartbeat": {name: agents[0].get(name, 0.0) for name in HEARTBEAT} if agents else None,
        "processes": [process.facts for process in host.processes],
    }


def _state_of(host: HostStatus, has_ranks: bool, live: HostView | None) -> str:
    """Return the state of a host: by its processes first, by the run's folder second."""
    if host.error:
        return "not reached"
    if has_ranks:
        return live.state if live and live.state not in EARLIER else "running"
    return "starting or stopping" if host.processes else "stopped"


def describe(report: dict[str, Any]) -> str:
    """Return the report as text, with hosts that are alike in one row."""
    lines = [
        f"run {report['run']} {one_line(report['name'])}: {_headline(report)}",
        f"folder {one_line(report['folder'])}",
    ]
    if not report["hosts"]:
        return "\n".join([*lines, ""])
    alike: dict[tuple[str, ...], list[str]] = {}
    for host in report["hosts"]:
        alike.setdefault(_cells(host), []).append(one_line(host["name"]))
    rows = [(grouped(names), *cells) for cells, names in alike.items()]
    drawn = table(HEAD, rows, ("hosts", "state", "processes"), ("step", "since", "last heard"))
    return "\n".join([*lines, "", drawn, f"{_verdict(report['hosts'])}\n"])


def _verdict(hosts: Sequence[dict[str, Any]]) -> str:
    states = Counter(one_line(host["state"]) for host in hosts)
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    silent = [one_line(host["name"]) for host in hosts if host["error"]]
    names = f" ({grouped(silent)})" if silent else ""
    return f"{plural(len(hosts), 'host')}: {counted}{names}"


def _headline(report: dict[str, Any]) -> str:
    if report["supervised"]:
        seconds = report["seconds"]
        return "running" if seconds is None else f"running for {duration(seconds)}"
    if report["exit_code"] is None:
        return "its launcher is gone; its hosts end it on their own"
    return f"ended with {report['exit_code']}: {one_line(report['cause'])}"


def _cells(host: dict[str, Any]) -> tuple[str, ...]:
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
