"""Counts of loss and correct predictions over batches."""

from __future__ import annotations

from typing import NamedTuple

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
