"""usage.jsonl: what every host of a run used over time."""

from __future__ import annotations

from pathlib import Path

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.errors import SaveError
from rackrun.launcher.run.events import Usage
from rackrun.launcher.run.plan import Plan
from rackrun.run_history import HostUsage, as_text

MOST_LINES = 10_000


class UsageLog:
    """Writes usage.jsonl: a line per host and moment, evenly over the run.

    Hosts report every few seconds. The file stays small however long a run takes: at its limit,
    every second line of a host goes, and from then on every second report. A disk that refuses it
    does not end the run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hosts: dict[int, str] = {}
        self._lines: dict[str, list[str]] = {}
        """Those of the file, by host."""
        self._reports: dict[str, int] = {}
        """How many each host has sent."""
        self._every = 1
        self._is_refused = False

    def begin(self, plan: Plan) -> None:
        """Take the names of the hosts of an attempt."""
        self._hosts = {host.node: host.name for host in plan.hosts}

    def add(self, usage: Usage, at: float) -> None:
        """Take what a host reported at a time since the epoch."""
        host = self._hosts[usage.node]
        number = self._reports.get(host, 0)
        self._reports[host] = number + 1
        if self._is_refused or number % self._every:
            return
        line = as_text(_line_of(host, usage, at))
        self._lines.setdefault(host, []).append(line)
        try:
            with translated_os_errors(self._path), self._path.open("a") as file:
                file.write(line)
            if sum(map(len, self._lines.values())) > max(MOST_LINES, 2 * len(self._lines)):
                self._thin()
        except SaveError:
            self._is_refused = True

    def _thin(self) -> None:
        self._every *= 2
        self._lines = {host: lines[::2] for host, lines in self._lines.items()}
        text = "".join(line for lines in self._lines.values() for line in lines)
        write_whole(self._path, text.encode())


def _line_of(host: str, usage: Usage, at: float) -> HostUsage:
    return HostUsage(
        time=round(at, 1),
        host=host,
        cpu=usage.cpu,
        memory=usage.memory,
        memory_total=usage.memory_total,
        received=usage.received,
        sent=usage.sent,
        gpus=tuple((gpu.busy, gpu.memory, gpu.memory_total) for gpu in usage.gpus),
    )
