"""The CPU cores that a process may use, by its affinity and by the quota of its control groups.

A container or a systemd slice with a quota of one core still shows all cores of the machine.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
MOUNTED = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return the number of cores that this process may use at a time."""
    if not hasattr(os, "sched_getaffinity"):  # macOS has neither
        return os.cpu_count() or 1
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), quota())))


def quota(own_groups: Path = OWN_GROUPS, mounted: Path = MOUNTED) -> float:
    """Return how many cores the control groups allow; infinity without a limit."""
    limits = [math.inf]
    with contextlib.suppress(OSError):
        for line in own_groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                limits += [_share(folder / "cpu.max") for folder in _levels(mounted, path)]
            elif "cpu" in controllers.split(","):
                limits += [
                    _share(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
                    for folder in _levels(mounted / controllers, path)
                ]
    return min(limits)


def _levels(mounted: Path, path: str) -> list[Path]:
    # The group and those around it; in a container its own is at the top.
    parts = [part for part in path.split("/") if part]
    return [mounted.joinpath(*parts[:count]) for count in range(len(parts) + 1)]


def _share(*files: Path) -> float:
    """Return quota over period, in microseconds, from one file or two."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        words = " ".join(file.read_text() for file in files).split()
        microseconds, period = int(words[0]), int(words[1])  # "max" is no limit, and no number
        if microseconds > 0:  # -1: no limit
            return microseconds / period
    return math.inf
