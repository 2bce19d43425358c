"""Counts over batches, summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from rackrun.errors import Problem

if TYPE_CHECKING:
    from rackrun.training.ranks import Ranks

MOST_CONFUSED = 1024  # classes: with more, the matrix would weigh as much as a model
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


class Diverged(Problem):
    """The loss is not a finite number."""


def check_finite(step: int, counts: Counts, scaling: Scaling | None) -> None:
    """Raise Diverged unless training can go on."""
    if counts.samples and not math.isfinite(counts.loss):
        symptom = f"the loss is {counts.loss}"
    elif scaling and scaling.is_lost:
        symptom = "gradients overflow float16 at any scale of the loss"
    else:
        return
    raise _diverged(symptom, step, ", or --precision fp32" if scaling else "")


def check_weights(step: int, are_finite: bool) -> None:
    """Raise Diverged unless a run could go on from the weights after this step."""
    if not are_finite:
        raise _diverged("weights are not finite", step)


def _diverged(symptom: str, step: int, other: str = "") -> Diverged:
    return Diverged(f"{symptom} at step {step}: type a lower --lr or --clip-grad 1{other}")


class Counter:
    """Adds up on the device, so that no step waits for a number."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)  # whole up to 2^53
        self._fields = self._sums.unbind()  # of the same memory
        self._samples = self._skipped = 0

    def add(self, parts: Iterable[Iterable[torch.Tensor]], samples: int, skipped: int) -> None:
        """Count a batch: in parts, the sums of loss, top-1 and, if there is a third one, top-5."""
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


class Confusion:
    """Counts evaluated samples by label and prediction, on the device."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self.classes = classes if classes <= MOST_CONFUSED else 0
        self.counts = torch.zeros(self.classes**2, dtype=torch.float64, device=device)

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch."""
        if self.classes:
            cells = labels * self.classes + logits.argmax(1)
            self.counts += torch.bincount(cells, minlength=len(self.counts))


class HighestLosses:
    """Finds the evaluated samples that the model gets most wrong."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []

    def add(self, logits: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Keep the losses of a batch, on the device; of noise, which has no rows, none."""
        if rows is not None:
            self._losses.append(cross_entropy(logits.float(), labels, reduction="none"))
            self._rows.append(rows)

    def rows_of_all(self, ranks: Ranks, count: int) -> list[int]:
        """Return the index rows of `count` samples of all ranks, the highest loss first."""
        table = torch.zeros(ranks.world, count, 2, dtype=torch.float64)  # a loss, its row
        table[ranks.rank, :, 0] = -1
        if self._losses:
            losses = torch.cat(self._losses).double().nan_to_num(nan=math.inf)
            highest, positions = losses.topk(min(count, len(losses)))
            this_rank = table[ranks.rank, : len(highest)]
            this_rank[:, 0], this_rank[:, 1] = highest.cpu(), torch.cat(self._rows)[positions.cpu()]
        candidates = ranks.all_reduce_sum(table).flatten(0, 1)
        candidates = candidates[candidates[:, 0] >= 0]
        order = candidates[:, 0].argsort(descending=True, stable=True)[:count]
        rows: list[int] = candidates[order, 1].long().tolist()
        return rows


def as_counts(sums: torch.Tensor) -> Counts:
    """Return sums as Python numbers."""
    loss, top1, top5, samples, skipped = sums.tolist()
    return Counts(loss, int(top1), int(top5), int(samples), int(skipped))


@torch.no_grad()
def correct_predictions(logits: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
    """Count samples whose label is among the `first` likeliest classes."""
    if first == 1:
        return (logits.argmax(1) == labels).sum()
    return (logits.topk(first, dim=1).indices == labels[:, None]).any(1).sum()


def evaluation_sums(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return loss, top-1 and top-5 of a batch, as sums: float64 (3,)."""
    loss = cross_entropy(logits.float(), labels, reduction="sum")
    top5 = correct_predictions(logits, labels, min(5, logits.shape[1]))
    return torch.stack(
        [loss.double(), correct_predictions(logits, labels, 1).double(), top5.double()]
    )
