"""Stragglers: the rank that the others wait for, and why.

Ranks of a task find it out among themselves, and the first one reports it. Scripts may report how
long each rank's own part of a step takes instead (docs/guides/own-script.md), and it
is found here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rackrun.units import plural

REASONS = ("data", "compute", "network")
"""Why ranks wait."""
PARTS = ("data", "compute")
"""What a rank may report of its step, as `data_seconds` and `compute_seconds`."""
STEPS_JUDGED = 50  # of each rank, as far as they were reported
WORTH_WAITING = 0.1  # of a step is worth a line

Parts = tuple[float, ...]


@dataclass(frozen=True)
class SlowRank:
    """A straggler, as the ranks found it."""

    rank: int
    """-1 when no rank can be named."""
    why: str
    """One of `REASONS`."""
    text: str
    """The whole report, as the ranks wrote it."""


def reported(fields: Mapping[str, Any]) -> SlowRank | None:
    """Return the straggler that the first rank reports, or None."""
    rank, why, text = (fields.get(name) for name in ("slow_rank", "slow_why", "slow"))
    if not isinstance(rank, int) or not isinstance(text, str) or not text:
        return None
    return SlowRank(rank, str(why), text) if why in REASONS else None


def parts_of(fields: Mapping[str, Any]) -> Parts | None:
    """Return a rank's own seconds in a step, by part; None when it reports none."""
    seconds = tuple(fields.get(f"{part}_seconds") for part in PARTS)
    return tuple(float(part or 0) for part in seconds) if any(seconds) else None


def straggler(steps: Mapping[int, Sequence[Parts]], hosts: Mapping[int, str]) -> SlowRank | None:
    """Return the rank that is late by its own part of steps, or None; both are by rank.

    No rank is done with a step before the slowest one is, so most others wait.
    """
    typical = {rank: _medians(parts) for rank, parts in steps.items()}
    if len(typical) < 2:
        return None
    slow = max(typical, key=lambda rank: sum(typical[rank]))
    slowest = typical.pop(slow)
    step = sum(slowest)
    others = _medians(list(typical.values()))
    waited = step - statistics.median_high(map(sum, typical.values()))
    if waited < WORTH_WAITING * step:
        return None
    part = max(range(len(PARTS)), key=lambda part: slowest[part] - others[part])
    count = plural(min(map(len, steps.values())), "step")
    return SlowRank(
        rank=slow,
        why=PARTS[part],
        text=f"last {count}: the others wait for rank {slow} on {hosts[slow]}"
        f" {waited * 1e3:.1f} of {step * 1e3:.1f} ms a step: its {PARTS[part]}"
        f" takes {slowest[part] * 1e3:.1f} ms, theirs {others[part] * 1e3:.1f} ms",
    )


def _medians(steps: Sequence[Parts]) -> Parts:
    return tuple(map(statistics.median, zip(*steps, strict=True)))
