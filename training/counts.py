"""Counts over batches, summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from rackrun.errors import Problem
from rackrun.training.differences import short
from rackrun.units import first_few, plural

if TYPE_CHECKING:
    from rackrun.training.ranks import Ranks

MOST_CONFUSED = 1024  # classes: with more, the matrix would weigh as much as a model
MOST_NAMED = 5  # samples in a line
LARGEST_LOSS = -math.log(torch.finfo(torch.float32).tiny)  # 87.3: of the least probability
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
    """The loss, the outputs or the weights are no finite numbers."""

    exit_code = 76


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


def not_finite(step: int, keys: Sequence[str], images: int) -> Diverged:
    """Return the error for a step whose loss is not finite before any weight changes by it.

    `keys` are those of its images that alone have no finite output.
    """
    if not keys:
        return _diverged(f"the loss of {plural(images, 'image')} is not finite", step)
    return Diverged(
        f"the model's output is not finite for {first_few([*map(short, keys)], MOST_NAMED)} (step"
        f" {step}): mend the model, or take such images out; where a model standardizes each image,"
        " one of a single color divides by 0"
    )


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
        """Count a batch, without images that have no answer."""
        if self.classes:
            cells = labels * self.classes + logits.argmax(1)
            # Not by bincount, nor by the cells chosen by a mask: both wait for the device.
            self.counts.index_add_(0, cells, answered(logits).double())


class NoAnswers:
    """Finds evaluated samples for which the model's output is not finite: no class is an answer."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []
        self._last: tuple[torch.Tensor, Sequence[tuple[str, str]]] | None = None

    def add(self, logits: torch.Tensor, keys: Sequence[tuple[str, str]]) -> None:
        """Keep a batch, and look at the one before, while the device works on this one.

        `keys` are shard and key of each sample, or none for noise.
        """
        self._look()
        self._last = ~answered(logits), keys

    def _look(self) -> None:
        if not self._last:
            return
        (is_bad, keys), self._last = self._last, None
        bad = is_bad.nonzero()[:, 0].tolist()
        self.count += len(bad)
        if keys and len(self.names) < MOST_NAMED:
            self.names += [f"{shard}: {key}" for shard, key in (keys[index] for index in bad)]

    def of_all(self, ranks: Ranks) -> str:
        """Return a line about those of all ranks, or ""."""
        self._look()
        count = int(ranks.all_reduce_sum(torch.tensor([float(self.count)], dtype=torch.float64))[0])
        if not count:
            return ""
        text = "\n".join(self.names[:MOST_NAMED]).encode()
        parts = ranks.all_gather(np.frombuffer(text, np.uint8))
        names = [name for part in parts for name in part.tobytes().decode().split("\n") if name]
        others = f" and {count - MOST_NAMED:,} more" if count > MOST_NAMED else ""
        shown = ", ".join(map(short, names[:MOST_NAMED])) + others
        return (
            f"the model's output is not finite for {plural(count, 'image')}, counted as wrong:"
            f" {shown or 'noise'}"
        )


class HighestLosses:
    """Finds the evaluated samples that the model gets most wrong."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []

    def add(self, logits: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Keep the losses of a batch, on the device; of noise, which has no rows, none."""
        if rows is not None:
            self._losses.append(finite_losses(logits, labels))
            self._rows.append(rows)

    def rows_of_all(self, ranks: Ranks, count: int) -> list[int]:
        """Return the index rows of `count` samples of all ranks, the highest loss first."""
        table = torch.zeros(ranks.world, count, 2, dtype=torch.float64)  # a loss, its row
        table[ranks.rank, :, 0] = -1
        if self._losses:
            losses = torch.cat(self._losses).double()
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


def answered(logits: torch.Tensor) -> torch.Tensor:
    """Return whether there is a probability for each class: bool (B,) of float (B, classes)."""
    return logits.float().softmax(1).isfinite().all(1)


def finite_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each sample, at most that of the least probability: float (B,)."""
    losses = cross_entropy(logits.float(), labels, reduction="none")
    return losses.nan_to_num(nan=LARGEST_LOSS).clamp(max=LARGEST_LOSS)


@torch.no_grad()
def correct_predictions(logits: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
    """Return whether the label is among the `first` likeliest classes: bool (B,)."""
    if first == 1:
        return logits.argmax(1) == labels
    return (logits.topk(first, dim=1).indices == labels[:, None]).any(1)


def evaluation_sums(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return loss, top-1 and top-5 of a batch, as sums: float64 (3,).

    A sample for which the output is not finite counts as wrong, with the largest loss.
    """
    has_answer = answered(logits)
    sums = [finite_losses(logits, labels).double().sum()]
    for first in (1, min(5, logits.shape[1])):
        sums.append((correct_predictions(logits, labels, first) & has_answer).double().sum())
    return torch.stack(sums)
