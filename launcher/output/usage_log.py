"""usage.jsonl in the run folder: what every host used over time, a line per host and moment.

Hosts report every few seconds. The file stays small however long a run takes: at its limit, two
lines of a host become one, their mean, and from then on a line covers twice the time.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from launcher.run.events import Usage
from rackrun.atomic import translated_os_errors, write_whole
from rackrun.errors import SaveError

FEWEST_LINES = 64  # of a host, after lines were joined
MOST_LINES = 20_000  # of the file, unless FEWEST_LINES of every host are more
WRITE_SECONDS = 3.0
FIRST_SECONDS = 3.0  # that a line covers, before lines are joined
FOREIGN = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""What reading and joining raise for lines that a rank has written to the file."""

UsageLine: TypeAlias = dict[str, Any]


class UsageLog:
    """Writes the file; a disk that refuses it does not end the run."""

    def __init__(self, path: Path, hosts: Mapping[int, str]) -> None:
        """Take the names of the hosts, by node."""
        self.path = path
        self.hosts = hosts
        self.most_lines = max(MOST_LINES, 2 * FEWEST_LINES * len(hosts))
        self.covers_seconds = FIRST_SECONDS
        self.gathered: dict[int, list[UsageLine]] = {}
        """What hosts reported since their last line."""
        self.waiting: list[UsageLine] = []
        self.lines = 0
        self.write_at = 0.0
        self.refused = False

    def add(self, usage: Usage, at: float) -> None:
        """Take what a host reported at a time since the epoch."""
        if self.refused:
            return
        gathered = self.gathered.setdefault(usage.node, [])
        if gathered and at - gathered[0]["time"] >= self.covers_seconds:
            self.waiting.append(_mean_line(gathered))
            gathered.clear()
        gathered.append(line_of(self.hosts[usage.node], usage, at))

    def write(self, now: float, everything: bool = False) -> None:
        """Append the lines that are complete, every few seconds; or all that there is."""
        if everything:
            self.waiting += [_mean_line(lines) for lines in self.gathered.values() if lines]
            self.gathered.clear()
        if not self.waiting or (now < self.write_at and not everything):
            return
        self.write_at = now + WRITE_SECONDS
        try:
            with translated_os_errors(self.path), self.path.open("a") as file:
                file.writelines(map(as_text, self.waiting))
            self.lines += len(self.waiting)
            while self.lines > self.most_lines:
                self._join()
        except (SaveError, *FOREIGN):
            self.refused = True
        self.waiting.clear()

    def _join(self) -> None:
        """Rewrite the file with half of its lines."""
        with translated_os_errors(self.path):
            lines = [json.loads(text) for text in self.path.read_text().splitlines()]
        joined = list(_joined_lines(lines))
        write_whole(self.path, "".join(map(as_text, joined)).encode())
        self.lines = len(joined)
        self.covers_seconds *= 2


def line_of(host: str, usage: Usage, at: float) -> UsageLine:
    """Return a report as a line; a GPU is its percent busy and its memory in MiB."""
    return {
        "time": round(at, 1),
        "host": host,
        "cpu": usage.cpu,
        "memory": usage.memory,
        "memory_total": usage.memory_total,
        "received": usage.received,
        "sent": usage.sent,
        "gpus": [[gpu.busy, gpu.memory, gpu.memory_total] for gpu in usage.gpus],
    }


def _joined_lines(lines: Iterable[UsageLine]) -> Iterator[UsageLine]:
    """Yield one line for every two of a host, in the order of time."""
    earlier: dict[str, UsageLine] = {}
    for line in lines:
        if before := earlier.pop(line["host"], None):
            yield _mean_line([before, line])
        else:
            earlier[line["host"]] = line
    yield from earlier.values()


def _mean_line(lines: Sequence[UsageLine]) -> UsageLine:
    """Return one line for several of a host: means, at the first one's time."""
    first = lines[0]
    if len(lines) == 1:
        return first
    same = [line for line in lines if len(line["gpus"]) == len(lines[-1]["gpus"])]
    return {
        **first,
        "cpu": round(statistics.fmean(line["cpu"] for line in lines), 3),
        **{
            name: round(statistics.fmean(line[name] for line in lines))
            for name in ("memory", "received", "sent")
        },
        "gpus": [
            [round(statistics.fmean(values)) for values in zip(*gpu, strict=True)]
            for gpu in zip(*(line["gpus"] for line in same), strict=True)
        ],
    }


def as_text(line: UsageLine) -> str:
    """Return a line of the file."""
    return json.dumps(line, separators=(",", ":")) + "\n"
