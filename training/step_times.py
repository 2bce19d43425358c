"""How long the parts of this rank's steps take.

    data       from the end of the last step until the batch is on the device
    compute    forward and backward, until the last of its own gradients is there
    exchange   until the gradients of all ranks are there; 0 on a single rank
    the rest   update and reports; not looked at

A step costs four readings of a clock: on a GPU, events in its own stream, which no host code waits
for until they are looked at.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rackrun.training.ranks import Ranks

Item = TypeVar("Item")
Times = npt.NDArray[np.float64]
Mark = float | torch.cuda.Event

PARTS = ("data", "compute", "exchange")


class StepTimes:
    """The clock of this rank's steps, read by those who look for data, stragglers and balance."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._on_gpu = ranks.device.type == "cuda"
        self._marks: list[Mark] = []  # of the current step
        self._steps: list[list[Mark]] = []  # since `take`
        self._hook: RemovableHandle | None = None
        if ranks.world > 1:
            # The first weight's gradient is the last one.
            first = next(weight for weight in model.parameters() if weight.requires_grad)
            self._hook = first.register_post_accumulate_grad_hook(self._computed)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Look at no further steps."""
        if self._hook:
            self._hook.remove()

    def watched(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the same batches; the work on each is timed until `exchanged` is called."""
        remaining = iter(batches)
        while True:
            self._marks = [self._now()]
            batch = next(remaining, None)
            if batch is None:
                return
            self._marks.append(self._now())
            yield batch

    def exchanged(self) -> None:
        """Note that all gradients of a step are there."""
        now = self._now()
        asked, arrived, *computed = self._marks
        self._steps.append([asked, arrived, *(computed or [now]), now])

    def take(self) -> Times:
        """Return the seconds of the parts of the steps since the last call: (steps, 3).

        It waits for the device.
        """
        steps, self._steps = self._steps, []
        rows = [[_between(*pair) for pair in pairwise(marks)] for marks in steps]
        return np.array(rows).reshape(-1, len(PARTS))

    def _computed(self, weight: torch.Tensor) -> None:
        del self._marks[2:]  # of a batch in several parts, the last one counts
        self._marks.append(self._now())

    def _now(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between(first: Mark, last: Mark) -> float:
    if isinstance(first, float) or isinstance(last, float):
        return float(last) - float(first)  # type: ignore[arg-type]
    last.synchronize()
    seconds: float = first.elapsed_time(last) / 1e3
    return max(seconds, 0.0)
