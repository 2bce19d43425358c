"""usage.jsonl: what every host of a run used over time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.errors import SaveError
from rackrun.launcher.run.events import Usage
from rackrun.run_history import MOST_USAGE_BYTES, HostUsage, as_text, usage_line
from rackrun.shapes import Misshapen

FEWEST_LINES = 64  # of a host in usage.jsonl, after lines were joined
MOST_LINES = 20_000  # of the file, unless FEWEST_LINES of every host are more
WRITE_SECONDS = 3.0
FIRST_SECONDS = 3.0  # that a line covers, before lines are joined


class UsageLog:
    """Writes usage.jsonl: what every host used over time, a line per host and moment.

    Hosts report every few seconds. The file stays small however long a run takes: at its limit, two
    lines of a host become one, their mean, and from then on a line covers twice the time. A disk
    that refuses it does not end the run.
    """

    def __init__(self, path: Path, hosts: dict[int, str]) -> None:
        """Take the names of the hosts, by node; there may be more later."""
        self.path = path
        self.hosts = hosts
        self.most_lines = max(MOST_LINES, 2 * FEWEST_LINES * len(hosts))
        self.covers_seconds = FIRST_SECONDS
        self.gathered: dict[int, list[HostUsage]] = {}
        """What hosts reported since their last line."""
        self.waiting: list[HostUsage] = []
        self.lines = 0
        self.write_at = 0.0
        self.refused = False

    def add(self, usage: Usage, at: float) -> None:
        """Take what a host reported at a time since the epoch."""
        if self.refused:
            return
        gathered = self.gathered.setdefault(usage.node, [])
        if gathered and at - gathered[0].time >= self.covers_seconds:
            self.waiting.append(_mean_line(gathered))
            gathered.clear()
        gathered.append(_line_of(self.hosts[usage.node], usage, at))

    def write(self, now: float, everything: bool = False) -> None:
        """Append the lines that are complete, every few seconds; `everything`: all lines, now."""
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
        except (SaveError, Misshapen):  # a full disk, or lines that a rank has written
            self.refused = True
        self.waiting.clear()

    def _join(self) -> None:
        with translated_os_errors(self.path), self.path.open("rb") as file:
            text = file.read(MOST_USAGE_BYTES + 1)
        if len(text) > MOST_USAGE_BYTES:
            raise Misshapen(f"longer than {MOST_USAGE_BYTES} bytes")
        joined = list(_joined_lines(map(usage_line, text.splitlines())))
        write_whole(self.path, "".join(map(as_text, joined)).encode())
        self.lines = len(joined)
        self.covers_seconds *= 2


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


def _joined_lines(lines: Iterable[HostUsage]) -> Iterator[HostUsage]:
    earlier: dict[str, HostUsage] = {}
    for line in lines:
        if before := earlier.pop(line.host, None):
            yield _mean_line([before, line])
        else:
            earlier[line.host] = line
    yield from earlier.values()


def _mean_line(lines: Sequence[HostUsage]) -> HostUsage:
    # It has the first line's time. The number of GPUs of a host may change: the last one counts.
    first, last = lines[0], lines[-1]
    if len(lines) == 1:
        return first
    same = [line.gpus for line in lines if len(line.gpus) == len(last.gpus)]
    return replace(
        first,
        cpu=round(statistics.fmean(line.cpu for line in lines), 3),
        memory=_mean(line.memory for line in lines),
        received=_mean(line.received for line in lines),
        sent=_mean(line.sent for line in lines),
        gpus=tuple(
            (_mean(busy), _mean(used), _mean(total))
            for busy, used, total in (zip(*gpu, strict=True) for gpu in zip(*same, strict=True))
        ),
    )


def _mean(values: Iterable[int]) -> int:
    return round(statistics.fmean(values))
