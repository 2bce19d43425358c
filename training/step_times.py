"""How long the parts of this rank's steps take.

    data       from the end of the last step until the batch is on the device
    compute    forward and backward, until the last of its own gradients is there
    exchange   until the gradients of all ranks are there
    the rest   update and reports; not looked at

A step costs up to four readings of a clock: on a GPU, events in its own stream, which no host code
waits for until they are looked at.
"""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rackrun.training.ranks import Ranks

Item = TypeVar("Item")
Times = npt.NDArray[np.float64]
Mark = float | torch.cuda.Event

PARTS = ("data", "compute", "exchange")
COMPUTE = PARTS.index("compute")
MARKS = len(PARTS) + 1


class StepTimes:
    """The clock of this rank's steps, read by those who look for data, stragglers and balance."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
        self._on_gpu = ranks.device.type == "cuda"
        self._marks: list[Mark] = []  # of the current step
        self._waits: list[list[Mark]] = []  # since `data_seconds`
        self._steps: list[list[Mark]] = []  # since `take`; between several ranks
        self._has_others = ranks.world > 1
        self._hooks: tuple[RemovableHandle, ...] = ()
        if self._has_others:
            first = next(weight for weight in model.parameters() if weight.requires_grad)
            self._hooks = (
                first.register_post_accumulate_grad_hook(self._computed),  # type: ignore[no-untyped-call]
                optimizer.register_step_pre_hook(self._exchanged),
            )

    def close(self) -> None:
        """Look at no further steps."""
        for hook in self._hooks:
            hook.remove()

    def watched(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Return the same batches; the work on each is timed until the next one is asked for."""
        remaining = iter(batches)
        while True:
            self._marks = [self._now()]
            for batch in remaining:
                self._marks.append(self._now())
                self._waits.append(self._marks)
                if self._has_others:
                    self._steps.append(self._marks)  # complete once the optimizer begins
                yield batch
                break
            else:
                return

    def data_seconds(self) -> float:
        """Return how long this rank waited for data since the last call; waits for the device."""
        waits, self._waits = self._waits, []
        return sum(_between(*marks[:2]) for marks in waits)

    def __len__(self) -> int:
        """Return the steps that `take` would return."""
        return len(self._steps)

    def take(self) -> Times:
        """Return the seconds of the parts of the steps since the last call: (steps, 3).

        They are -1 of a step in which this rank had no part.
        """
        steps, self._steps = self._steps, []
        rows = [
            [_between(*pair) for pair in zip(marks, marks[1:], strict=False)]
            if len(marks) == MARKS
            else [-1.0] * len(PARTS)
            for marks in steps
        ]
        return np.array(rows).reshape(-1, len(PARTS))

    def _computed(self, weight: torch.Tensor) -> None:
        # The first weight's gradient is the last one. Of a batch in several parts, the last counts.
        del self._marks[2:]
        self._marks.append(self._now())

    def _exchanged(self, optimizer: Optimizer, *arguments: object) -> None:
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
