"""Run checks on the facts about hosts, and say what keeps a run from starting.

A check reads facts of a host and yields faults, looking at the other hosts where it must. A host
with one is not started on, unless the fault only warns, or `--ignore-check` names the check.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from rackrun.errors import Problem
from rackrun.launcher.errors import AccessRefused, HostUnreachable, PreflightRefused
from rackrun.launcher.preflight.facts import ClusterFacts, HostFacts
from rackrun.launcher.run.host_names import grouped
from rackrun.terminal import clean_lines, one_line

Level = Literal["ok", "warning", "refused"]


class Fault(NamedTuple):
    """Why a host is not fit."""

    problem: str
    hint: str = ""
    """What to type, or where to look."""
    warns: bool = False
    """It never keeps a run from starting."""
    busy: bool = False
    """Another run uses the host, or waits for it: later it will be fit."""
    hint_here: str = ""
    """What to type instead where the only host is this machine."""


class Check(NamedTuple):
    """One thing to check."""

    name: str
    faults: Callable[[HostFacts, ClusterFacts], Iterable[Fault]]
    found: Callable[[HostFacts], str] = lambda host: ""
    """What the table shows of a host; empty when it was not looked at."""
    error: type[Problem] = PreflightRefused
    """What a launch ends with that this check alone refuses."""
    needed: bool = False
    """The plan depends on its reply, so --ignore-check cannot name it."""
    of_interpreter: bool = False
    """It is about the ranks' interpreter, which --sync leaves alone where `python=` names it."""
    of_others: bool = False
    """It is about other machines or other launches, so not for a launch on this machine alone."""


class TableRow(NamedTuple):
    """Result of one check on one host."""

    check: str
    host: str
    level: Level
    found: str
    problem: str = ""
    hint: str = ""
    busy: bool = False


def examine(
    cluster: ClusterFacts,
    checks: Sequence[Check],
    accepted: Collection[str] = (),
) -> tuple[TableRow, ...]:
    """Run every check on every host; leave out the checks of a host without a reply.

    Faults of the `accepted` ones only warn, as those that --ignore-check names. What pending checks
    find wrong will be right once the launch has done what it will do about them.
    """
    requirements, rows = cluster.requirements, list[TableRow]()
    allowed = (*requirements.options.ignore_check, *accepted)
    for facts in cluster.hosts:
        label = facts.host.label
        if facts.error is not None:
            text = clean_lines(str(facts.error).removeprefix(f"{label}: "))
            rows.append(TableRow("reachable", label, "refused", "", text))
            continue
        rows.append(TableRow("reachable", label, "ok", "yes"))
        for check in checks:
            if check.of_others and requirements.is_here:
                continue
            is_fixed = check.name in requirements.pending and not (
                check.of_interpreter and facts.host.python
            )
            fix = requirements.pending[check.name] if is_fixed else ""
            rows += _rows(check, facts, cluster, check.name in allowed, fix)
    return tuple(rows)


def _rows(
    check: Check, facts: HostFacts, cluster: ClusterFacts, is_allowed: bool, fix: str
) -> Iterator[TableRow]:
    label, found = facts.host.label, one_line(check.found(facts))
    faults = list(check.faults(facts, cluster))
    if faults and fix:
        yield TableRow(check.name, label, "ok", fix)
    elif not faults and found:
        yield TableRow(check.name, label, "ok", found)
    else:
        for problem, hint, warns, busy, hint_here in faults:
            level: Level = "warning" if warns or is_allowed else "refused"
            hint = hint_here if hint_here and cluster.requirements.is_here else hint
            yield TableRow(check.name, label, level, found, one_line(problem), hint, busy)


def refusal(
    cluster: ClusterFacts, checks: Sequence[Check], rows: Sequence[TableRow]
) -> Problem | None:
    """Return the error that keeps the run from starting, a line per host and check, or None."""
    refused = [row for row in rows if row.level == "refused"]
    if not refused:
        return None
    text = "\n".join(lines_of(refused))
    hosts = {row.host for row in refused}
    errors = [facts.error for facts in cluster.hosts if facts.error is not None]
    if any(isinstance(error, AccessRefused) for error in errors):
        return AccessRefused(text, hosts)
    if errors:
        return HostUnreachable(text, hosts)
    names = {row.check for row in refused}
    kinds = {check.error for check in checks if check.name in names}
    return (kinds.pop() if len(kinds) == 1 else PreflightRefused)(text, hosts)


def are_only_busy(rows: Sequence[TableRow]) -> bool:
    """Return True if the only reason against a start is that other runs use the hosts."""
    return all(row.busy for row in rows if row.level == "refused")


def warnings(rows: Sequence[TableRow]) -> list[str]:
    """Return warnings, one line each."""
    return lines_of([row for row in rows if row.level == "warning"])


def lines_of(rows: Sequence[TableRow]) -> list[str]:
    """Return a line per check and problem, with its hosts together, and each hint once."""
    hosts: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        hosts.setdefault((row.check, row.problem, row.hint), []).append(row.host)
    lines, said = [], set[tuple[str, str]]()
    for (check, problem, hint), names in hosts.items():
        advice = f"; {hint}" if hint and (check, hint) not in said else ""
        said.add((check, hint))
        lines.append(f"{grouped(names)}: {check}: {problem}{advice}")
    return lines
