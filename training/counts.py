"""Counts of loss and correct predictions over batches, and the scale of the loss in float16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

TOP5_CLASSES = 5  # with more classes than this, being among the first five counts for something


class Counts(NamedTuple):
    """Sums over images, and over the steps that have trained on them."""

    loss: float = 0.0
    top1: int = 0
    top5: int = 0
    samples: int = 0
    skipped: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    """How long ranks waited for data, on average."""
    skipped_steps: int = 0
    """As gradients overflowed float16."""

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

    @property
    def images_per_second(self) -> float:
        """The speed of all ranks."""
        return self.samples / max(self.seconds, 1e-9)

    @property
    def data_share(self) -> float:
        """The part of the time for which ranks waited for data."""
        return min(self.data_seconds / max(self.seconds, 1e-9), 1.0)

    def plus(self, other: Counts) -> Counts:
        """Return the sums over the images and steps of both."""
        return Counts._make(one + more for one, more in zip(self, other, strict=True))


class Scaling(NamedTuple):
    """The scale of the loss in float16, and the steps skipped since the last look at it."""

    scale: float
    skipped: int


class Counter:
    """Adds up on the device, so that no step waits for a number."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # whole up to 2^53
        self._loss, self._right = self._sums.unbind()  # of the same memory
        self._samples = self._skipped = 0

    def add(
        self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]], samples: int, skipped: int
    ) -> None:
        """Count a batch: in parts, the sums of loss and of right answers."""
        for loss, right in parts:
            self._loss.add_(loss)
            self._right.add_(right)
        self._samples += samples
        self._skipped += skipped

    def take(self) -> list[float]:
        """Return loss, right answers, samples and skipped ones, and begin anew."""
        sums = [*self._sums.tolist(), self._samples, self._skipped]  # waits for the device
        self._sums.zero_()
        self._samples = self._skipped = 0
        return sums
