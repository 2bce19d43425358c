"""The CPU cores that a process may use, by its affinity and by the quota of its control groups.

A container or a systemd slice with a quota of one core still shows all cores of the machine.
"""

from __future__ import annotations

import contextlib
import math
import os

OWN_GROUPS = "/proc/self/cgroup"
MOUNTED = "/sys/fs/cgroup"


def cores() -> int:
    """Return the number of cores that this process may use at a time."""
    if not hasattr(os, "sched_getaffinity"):  # macOS has neither
        return os.cpu_count() or 1
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), quota())))


def quota(own_groups: str = OWN_GROUPS, mounted: str = MOUNTED) -> float:
    """Return how many cores the control groups allow; infinity without a limit."""
    limits = [math.inf]
    with contextlib.suppress(OSError), open(own_groups) as file:
        for line in file.read().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                limits += [_share(f"{folder}/cpu.max") for folder in _levels(mounted, path)]
            elif "cpu" in controllers.split(","):
                limits += [
                    _share(f"{folder}/cpu.cfs_quota_us", f"{folder}/cpu.cfs_period_us")
                    for folder in _levels(f"{mounted}/{controllers}", path)
                ]
    return min(limits)


def _levels(mounted: str, path: str) -> list[str]:
    # The group and those around it; in a container its own is at the top.
    parts = [part for part in path.split("/") if part]
    return ["/".join([mounted, *parts[:count]]) for count in range(len(parts) + 1)]


def _share(*files: str) -> float:
    """Return quota over period, in microseconds, from one file or two."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        words: list[str] = []
        for name in files:
            with open(name) as file:
                words += file.read().split()
        microseconds, period = int(words[0]), int(words[1])  # "max" is no limit, and no number
        if microseconds > 0:  # -1: no limit
            return microseconds / period
    return math.inf
