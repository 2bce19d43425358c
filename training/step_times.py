"""How long the parts of a rank's steps take, and now and then those of all ranks.

    data       from the end of the last step until the batch is on the device
    compute    forward and backward, until the last of its own gradients is there
    exchange   until the gradients of all ranks are there
    the rest   update and reports; not looked at

A step costs up to four readings of a clock: on a GPU, events in its own stream, which no host code
waits for until they are looked at.

After the first few steps and then every few hundred the ranks exchange what they saw: 24 bytes a
step. The first step of a run, in which torch sets itself up, is left out.
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
FIRST_STEPS, EVERY_STEPS = 20, 200  # until the first exchange, and between later ones


class StepTimes:
    """The clock of this rank's steps, read by those who look for data, stragglers and balance."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._on_gpu = ranks, ranks.device.type == "cuda"
        self._marks: list[Mark] = []  # of the current step
        self._waits: list[list[Mark]] = []  # since `data_seconds`
        self._steps: list[list[Mark]] = []  # since `of_all_ranks`; between several ranks
        self._is_first = True
        self._hooks: tuple[RemovableHandle, ...] = ()

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Look at the weights that train from here on, anew."""
        if self._ranks.world == 1:
            return
        for hook in self._hooks:
            hook.remove()
        self._steps = []
        first = next(weight for weight in model.parameters() if weight.requires_grad)
        self._hooks = (
            first.register_post_accumulate_grad_hook(self._computed),  # type: ignore[no-untyped-call]
            optimizer.register_step_pre_hook(self._exchanged),
        )

    def watched(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Return the same batches; the work on each is timed until the next one is asked for."""
        remaining = iter(batches)
        while True:
            self._marks = [self._now()]
            for batch in remaining:
                self._marks.append(self._now())
                self._waits.append(self._marks)
                if self._ranks.world > 1:
                    self._steps.append(self._marks)  # complete once the optimizer begins
                yield batch
                break
            else:
                return

    def data_seconds(self) -> float:
        """Return how long this rank waited for data since the last call; waits for the device."""
        waits, self._waits = self._waits, []
        return sum(_between(*marks[:2]) for marks in waits)

    def of_all_ranks(self) -> Times | None:
        """Return the times of all ranks after enough steps: (ranks, steps, parts), in seconds.

        It is a collective on all ranks. Times are -1 of a step in which a rank had no part.
        """
        if len(self._steps) < (FIRST_STEPS if self._is_first else EVERY_STEPS):
            return None
        steps, self._steps = self._steps[1:] if self._is_first else self._steps, []
        self._is_first = False
        rows = [
            [_between(*pair) for pair in zip(marks, marks[1:], strict=False)]
            if len(marks) == MARKS
            else [-1.0] * len(PARTS)
            for marks in steps
        ]
        every = np.frombuffer(b"".join(self._ranks.gather(np.array(rows).tobytes())))
        return every.reshape(self._ranks.world, len(steps), len(PARTS))

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
