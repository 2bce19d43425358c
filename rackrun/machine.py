"""Facts about this machine that several packages need."""

from __future__ import annotations

import os


def core_count() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # macOS has no affinity
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
