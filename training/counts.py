"""Counts of loss and correct predictions over batches, and the scale of the loss in float16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

TOP5_CLASSES = 5  # with more classes than this, being among the first five counts for something


class Counts(NamedTuple):
    """Sums over images."""

    loss: float = 0.0
    top1: int = 0
    top5: int = 0
    samples: int = 0
    skipped: int = 0

    @property
    def mean_loss(self) -> float:
        """Return the mean loss per image, in nats."""
        return self.loss / max(self.samples, 1)

    @property
    def accuracy(self) -> float:
        """Return top-1 accuracy, 0 to 1."""
        return self.top1 / max(self.samples, 1)

    @property
    def accuracy5(self) -> float:
        """Return top-5 accuracy, 0 to 1."""
        return self.top5 / max(self.samples, 1)

    def plus(self, other: Counts) -> Counts:
        """Return the sums over the images of both."""
        return as_counts(torch.tensor([self, other], dtype=torch.float64).sum(0))


SMALLEST_SCALE = 2.0**-16
"""At less, a gradient that overflows is of no use: 32 steps in a row were skipped since the start.
"""


class Scaling(NamedTuple):
    """The scale of the loss in float16, and the steps skipped since the last look at it."""

    scale: float
    skipped: int

    @property
    def is_lost(self) -> bool:
        """Return whether gradients overflow at any scale."""
        return self.scale < SMALLEST_SCALE


class Counter:
    """Adds up on the device, so that no step waits for a number."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)  # whole up to 2^53
        self._fields = self._sums.unbind()  # of the same memory
        self._samples = self._skipped = 0

    def add(self, parts: Iterable[Iterable[torch.Tensor]], samples: int, skipped: int) -> None:
        """Count a batch: in parts, the sums of loss and of right answers."""
        for sums in parts:
            for field, value in zip(self._fields, sums, strict=False):
                field.add_(value)
        self._samples += samples
        self._skipped += skipped

    @property
    def sums(self) -> torch.Tensor:
        """Return the fields of Counts, as sums: float64 (5,)."""
        self._sums[3], self._sums[4] = self._samples, self._skipped
        return self._sums

    def clear(self) -> None:
        """Begin anew."""
        self._sums.zero_()
        self._samples = self._skipped = 0


def as_counts(sums: torch.Tensor) -> Counts:
    """Return sums as Python numbers."""
    loss, top1, top5, samples, skipped = sums.tolist()
    return Counts(loss, int(top1), int(top5), int(samples), int(skipped))
