"""What the hosts of a run used over time.

The launcher writes it to usage.jsonl; report.html reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from rackrun.shapes import Count, at_most, between, parsed

MOST_USAGE_BYTES = 1 << 26  # of usage.jsonl
LINE_BYTES = 1 << 16

GpuUsage: TypeAlias = tuple[Annotated[int, between(0, 100)], Count, Count]
"""Percent busy, memory in use and memory in all, in MiB."""


@dataclass(frozen=True)
class HostUsage:
    """What a host used at a time: CPU as a fraction of all cores, memory in bytes."""

    time: Annotated[float, between(0, 1e11)]
    """Seconds since the epoch."""
    host: Annotated[str, at_most(300)]
    cpu: Annotated[float, between(0, 1)]
    memory: Count
    memory_total: Count
    received: Count
    """Bytes per second from the network."""
    sent: Count
    """Bytes per second to the network."""
    gpus: Annotated[tuple[GpuUsage, ...], at_most(1024)]

    @property
    def gpu(self) -> float | None:
        """Return the mean part of the time in which its GPUs were busy; None without GPUs."""
        return sum(busy for busy, _, _ in self.gpus) / len(self.gpus) / 100 if self.gpus else None


def usage_line(text: bytes | str) -> HostUsage:
    """Return a line of the file; raise Misshapen for anything else."""
    return parsed(text, HostUsage, LINE_BYTES)


def as_text(line: HostUsage) -> str:
    """Return a line for the file."""
    return json.dumps(vars(line), separators=(",", ":")) + "\n"
