"""A trace of chosen steps by torch.profiler, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from rackrun.atomic import translated_os_errors
from rackrun.training.settings.run import PROFILED

Item = TypeVar("Item")


def traced(batches: Generator[Item], steps: str, done: int, path: Path) -> Generator[Item]:
    """Yield the batches of the steps after those that are done; write a trace of chosen ones.

    `steps`: FIRST,LAST, counted from 1, both included.
    """
    first, last = first_and_last(steps)
    yield from islice(batches, max(first - 1 - done, 0))
    if done < first:
        # One cycle, so nothing accumulates; torch 2.10 warns of what is dropped otherwise.
        profile = torch.profiler.profile(acc_events=True)
        profile.start()
        try:
            yield from islice(batches, last - first + 1)
        finally:  # of the batches, too, where the last one that was asked for is traced
            profile.stop()
            with translated_os_errors(path):
                profile.export_chrome_trace(str(path))
    yield from batches


def first_and_last(steps: str) -> tuple[int, int]:
    """Return the numbers in --profile-steps; zeros without any."""
    match = PROFILED.fullmatch(steps)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def trace_remark(steps: str, path: Path) -> str:
    """Return where the trace is, or why there is none."""
    if path.exists():
        return f"trace: {path} (open it in https://ui.perfetto.dev)"
    return f"no trace: this run took no step {first_and_last(steps)[0]} (--profile-steps)"
