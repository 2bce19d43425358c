"""The table of `--check`: hosts with the same finding on one line, hints once, then the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rackrun.launcher.preflight.examine import Level, TableRow
from rackrun.launcher.run.host_names import grouped, said_once
from rackrun.tables import table
from rackrun.units import plural

HEAD = ("", "check", "hosts", "found", "problem")
WRAPPED = ("hosts", "found", "problem")
MARKS: dict[Level, str] = {"ok": "", "warning": "!", "refused": "X"}


def shown(rows: Sequence[TableRow]) -> str:
    """Return all checks for people: the table, what to do, and whether a run could start."""
    details = said_once((row.host, row.problem) for row in rows if "\n" in row.problem)
    parts = [
        table(HEAD, _table_rows(rows), WRAPPED),
        details,
        "\n".join(hints(rows)),
        verdict(rows),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _table_rows(rows: Sequence[TableRow]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for check in dict.fromkeys(row.check for row in rows):
        of_check = [row for row in rows if row.check == check]
        hosts: dict[tuple[Level, str, str], list[str]] = {}
        for row in of_check:
            problem = row.problem.partition("\n")[0]  # further lines follow the table
            hosts.setdefault((row.level, row.found, problem), []).append(row.host)
        for number, ((level, value, problem), same) in enumerate(hosts.items()):
            who = "all hosts" if len(same) == len(of_check) > 1 else grouped(same)
            lines.append((MARKS[level], "" if number else check, who, value, problem))
    return lines


def hints(rows: Sequence[TableRow]) -> list[str]:
    """Return what to do, a line per cause."""
    return list(dict.fromkeys(f"{row.check}: {row.hint}" for row in rows if row.hint))


def verdict(rows: Sequence[TableRow]) -> str:
    """Return whether a run could start on these hosts."""
    hosts = list(dict.fromkeys(row.host for row in rows))
    refused = {row.host for row in rows if row.level == "refused"}
    if refused:
        names = grouped(host for host in hosts if host in refused)
        return f"not ready: {len(refused)} of {plural(len(hosts), 'host')} ({names})"
    warned = {row.host for row in rows if row.level == "warning"}
    return f"ready: {plural(len(hosts), 'host')}{', with warnings' if warned else ''}"
