"""Predictions of a model, a row for each evaluated sample; every score is computed from these rows.

    logits, labels -> Table: a row per sample, on the device -> rows of all ranks -> Scores

Calibration is the expected calibration error of Guo et al., "On Calibration of Modern Neural
Networks", ICML 2017: 15 bins of equal width over the probability of the predicted class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from rackrun.training.counts import Counts
from rackrun.training.data.ring import Batch
from rackrun.training.differences import short
from rackrun.training.ranks import Ranks
from rackrun.units import plural

COLUMNS = 7
MOST_CONFUSED = 1024  # classes: with more, the matrix would weigh as much as a model
MOST_NAMED = 5  # samples in a line
LARGEST_LOSS = -math.log(torch.finfo(torch.float32).tiny)  # 87.3: of the least probability
BINS = 15


class Table:
    """The predictions of this rank, on the device: no batch waits for a number."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._rows: list[torch.Tensor] = []
        self.keys: list[tuple[str, str]] = []
        """Shard and key of each sample; of noise none."""
        self._skipped = 0

    @torch.no_grad()
    def add(self, logits: torch.Tensor, batch: Batch) -> None:
        """Add a batch: float (B, classes). An output that is not finite is a wrong answer."""
        labels, best = batch.labels, answers(logits, 5)
        rows = torch.full_like(labels, -1) if batch.rows is None else batch.rows
        columns = (
            *(labels, best.classes[:, 0], finite_losses(logits, labels), rows.to(labels.device)),
            *(best.shares[:, 0], (best.classes == labels[:, None]).any(1), best.are_finite),
        )
        self._rows.append(torch.stack([each.double() for each in columns], 1))
        self.keys += batch.keys
        self.skip(batch)

    def skip(self, batch: Batch) -> None:
        """Count the samples that a batch has left out."""
        self._skipped += batch.skipped

    def rows(self) -> NDArray[np.float64]:
        """Return what this rank has added, a row for each sample: float64 (samples, COLUMNS)."""
        if not self._rows:
            return np.zeros((0, COLUMNS))
        return torch.cat(self._rows).cpu().numpy()

    def scores(self, ranks: Ranks) -> Scores:
        """Return the scores of all ranks' predictions; every rank has to ask."""
        own = self.rows()
        rows = np.frombuffer(b"".join(ranks.gather(own.tobytes()))).reshape(-1, COLUMNS)
        skipped = int(ranks.all_reduce_sum(torch.tensor(self._skipped)))
        scores = Scores(rows, skipped, self._classes)
        if unanswered := int((~scores.has_answer).sum()):
            scores.remark = self._unanswered(own[:, -1] == 0, unanswered, ranks)
        return scores

    def _unanswered(self, is_bad: NDArray[np.bool_], count: int, ranks: Ranks) -> str:
        numbers = np.flatnonzero(is_bad)[:MOST_NAMED] if self.keys else ()
        own = "\n".join(": ".join(self.keys[number]) for number in numbers)
        parts = ranks.gather(own.encode())
        names = [name for part in parts for name in part.decode().split("\n") if name]
        others = f" and {count - MOST_NAMED:,} more" if count > MOST_NAMED else ""
        shown = ", ".join(map(short, names[:MOST_NAMED])) + others
        return (
            f"the model's output is not finite for {plural(count, 'image')}, counted as wrong:"
            f" {shown or 'noise'}"
        )


class Answers(NamedTuple):
    """The likeliest classes of images, and whether each class has a probability."""

    classes: torch.Tensor  # int64 (B, most), the likeliest first
    shares: torch.Tensor  # float (B, most): their probabilities
    are_finite: torch.Tensor  # bool (B,)


@torch.no_grad()
def answers(logits: torch.Tensor, most: int = 1) -> Answers:
    """Return what logits say, float (B, classes); of equal ones the first class counts."""
    shares = logits.softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))
    classes = logits.sort(dim=1, descending=True, stable=True).indices[:, :most]
    return Answers(classes, shares.gather(1, classes), shares.isfinite().all(1))


def finite_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each sample, at most that of the least probability: float (B,)."""
    losses = cross_entropy(logits.float(), labels, reduction="none")
    return losses.nan_to_num(nan=LARGEST_LOSS).clamp(max=LARGEST_LOSS)


@dataclass(frozen=True)
class ClassScore:
    """Counts of one class."""

    name: str
    samples: int
    right: int
    """Samples of this class that were predicted as it."""
    predicted: int
    """Samples of any class that were predicted as it."""

    @property
    def accuracy(self) -> float | None:
        """Return the recall: the part of its samples predicted as it; None without samples."""
        return self.right / self.samples if self.samples else None

    @property
    def precision(self) -> float | None:
        """Return the part of the predictions of it that were right; None without predictions."""
        return self.right / self.predicted if self.predicted else None


@dataclass(frozen=True)
class Bin:
    """Samples predicted with about the same confidence."""

    samples: int
    confidence: float
    """Mean probability of the predicted class."""
    accuracy: float


class Scores:
    """What evaluated samples come to, over all ranks."""

    def __init__(self, rows: NDArray[np.float64], skipped: int, classes: int) -> None:
        self.classes = classes
        self.labels, self.predicted = (column.astype(np.int64) for column in rows.T[:2])
        self.losses, self.index_rows, self.confidence, among_five, has_answer = rows.T[2:]
        self.has_answer = has_answer == 1
        self.right = (self.labels == self.predicted) & self.has_answer
        self.counts = Counts(
            float(self.losses.sum()),
            int(self.right.sum()),
            int(((among_five == 1) & self.has_answer).sum()),
            len(rows),
            skipped,
        )
        self.remark = ""
        """A line about samples for which the output is not finite."""

    @cached_property
    def confusion(self) -> NDArray[np.int64] | None:
        """Answered samples by label (row) and prediction; None with more than 1,024 classes."""
        if self.classes > MOST_CONFUSED:
            return None
        cells = (self.labels * self.classes + self.predicted)[self.has_answer]
        counts = np.bincount(cells, minlength=self.classes**2)
        return counts.reshape(self.classes, self.classes)

    def by_class(self, names: Sequence[str]) -> list[ClassScore]:
        """Return the counts of each class."""
        samples, right, predicted = (
            np.bincount(each, minlength=self.classes).tolist()
            for each in (
                self.labels,
                self.labels[self.right],
                self.predicted[self.has_answer],
            )
        )
        return [ClassScore(*each) for each in zip(names, samples, right, predicted, strict=True)]

    @cached_property
    def bins(self) -> list[Bin]:
        """The samples by confidence: bin m holds those in ((m - 1) / 15, m / 15]."""
        confidence, right = self.confidence[self.has_answer], self.right[self.has_answer]
        number = np.clip(np.ceil(confidence * BINS).astype(np.int64), 1, BINS) - 1
        counts = np.bincount(number, minlength=BINS)
        confidences, accuracies = (
            np.bincount(number, weights=each, minlength=BINS) / np.maximum(counts, 1)
            for each in (confidence, right)
        )
        return [
            Bin(*each)
            for each in zip(*map(np.ndarray.tolist, (counts, confidences, accuracies)), strict=True)
        ]

    @property
    def calibration_error(self) -> float:
        """Return the expected calibration error, 0 to 1."""
        gaps = sum(each.samples * abs(each.accuracy - each.confidence) for each in self.bins)
        return gaps / max(self.counts.samples, 1)

    def hardest(self, count: int) -> list[int]:
        """Return the index rows of the samples with the highest loss, the highest first."""
        known = self.index_rows >= 0  # noise has no rows
        order = np.argsort(-self.losses[known], kind="stable")[:count]
        rows: list[int] = self.index_rows[known][order].astype(np.int64).tolist()
        return rows
