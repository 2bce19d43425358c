"""A trace of chosen steps by torch.profiler, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import torch

from rackrun.atomic import translated_os_errors
from rackrun.training.ranks import Ranks
from rackrun.training.settings.run import PROFILED

Item = TypeVar("Item")


class StepTrace:
    """Traces the first rank from one step to another, both included."""

    def __init__(self, steps: str, path: Path, ranks: Ranks) -> None:
        """Take `steps`, FIRST,LAST counted from 1 or nothing, and the file to write."""
        chosen = PROFILED.fullmatch(steps) if ranks.first else None
        self._first, self._last = (int(chosen[1]), int(chosen[2])) if chosen else (0, 0)
        self._path = path
        self._device = ranks.device
        self._profile: torch.profiler.profile | None = None

    def watched(self, batches: Generator[Item], done: int) -> Generator[Item]:
        """Return the batches of the steps after those that are done; trace the chosen ones."""
        return self._traced(batches, done) if self._first else batches

    def _traced(self, batches: Generator[Item], done: int) -> Generator[Item]:
        for step, batch in enumerate(batches, start=done + 1):
            if step == self._first:
                self._begin()
            yield batch
            if step == self._last:  # here, once the step is done: the loop asks for the next batch
                self.close()

    def _begin(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # One cycle, so nothing accumulates; torch 2.10 warns of what is dropped otherwise.
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)
        self._profile.start()

    def close(self) -> None:
        """Write what has been traced so far, if anything."""
        if self._profile:
            self._profile.stop()
            with translated_os_errors(self._path):
                self._profile.export_chrome_trace(str(self._path))
            self._profile = None

    def remark(self) -> str:
        """Return where the trace is, or why there is none; empty without --profile-steps."""
        if not self._first:
            return ""
        if self._path.exists():
            return f"trace: {self._path} (open it in https://ui.perfetto.dev)"
        return f"no trace: this run took no step {self._first} (--profile-steps)"
