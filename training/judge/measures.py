"""What a model's predictions of labeled images are worth, in exact sums over all samples and ranks.

    logits, labels -> Tally: sums on the device -> summed over ranks -> Judgement: plain numbers

Calibration is the expected calibration error of Guo et al., "On Calibration of Modern Neural
Networks", ICML 2017: 15 bins of equal width over the probability of the predicted class.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from training.counts import Confusion, Counter, Counts, as_counts, evaluation_sums
from training.data.samples import Batch
from training.ranks import Ranks

BINS = 15


class Tally:
    """Sums over evaluated samples, on the device."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self._counter = Counter(device)
        self._confusion = Confusion(classes, device)
        self._classes = torch.zeros(3, classes, dtype=torch.float64, device=device)
        self._bins = torch.zeros(3, BINS, dtype=torch.float64, device=device)

    def add(self, logits: torch.Tensor, batch: Batch) -> None:
        """Count a batch."""
        labels = batch.labels
        self._counter.add([evaluation_sums(logits, labels)], len(labels), batch.skipped)
        self._confusion.add(logits, labels)
        confidence, predicted = logits.softmax(1).max(1)
        right = (predicted == labels).double()
        size = self._classes.shape[1]
        self._classes[0] += torch.bincount(labels, minlength=size)
        self._classes[1] += torch.bincount(labels, right, size)
        self._classes[2] += torch.bincount(predicted, minlength=size)
        # Bin m holds the confidences in ((m - 1) / BINS, m / BINS].
        bins = (confidence.double() * BINS).ceil().long().clamp(1, BINS) - 1
        self._bins[0] += torch.bincount(bins, minlength=BINS)
        self._bins[1] += torch.bincount(bins, confidence.double(), BINS)
        self._bins[2] += torch.bincount(bins, right, BINS)

    def skip(self, batch: Batch) -> None:
        """Count a batch without an image that can be decoded."""
        self._counter.add([], 0, batch.skipped)

    def judgement(self, ranks: Ranks, classes: list[str]) -> Judgement:
        """Return what all ranks counted together."""
        counts = as_counts(ranks.all_reduce_sum(self._counter.sums))
        matrix = ranks.all_reduce_sum(self._confusion.counts).long()
        side = self._confusion.classes
        return Judgement(
            counts,
            [
                ClassScore(name, int(samples), int(right), int(predicted))
                for name, samples, right, predicted in zip(
                    classes, *ranks.all_reduce_sum(self._classes).tolist(), strict=True
                )
            ],
            [
                Bin(int(samples), confidence / (samples or 1), right / (samples or 1))
                for samples, confidence, right in ranks.all_reduce_sum(self._bins).T.tolist()
            ],
            matrix.reshape(side, side).tolist(),
        )


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
        """Return the share of its samples that were found (recall); None without samples."""
        return self.right / self.samples if self.samples else None

    @property
    def precision(self) -> float | None:
        """Return the share of its predictions that were right; None without predictions."""
        return self.right / self.predicted if self.predicted else None


@dataclass(frozen=True)
class Bin:
    """Samples predicted with about the same confidence."""

    samples: int
    confidence: float
    """Mean probability of the predicted class."""
    accuracy: float


@dataclass(frozen=True)
class Judgement:
    """All that an evaluation found."""

    counts: Counts
    classes: list[ClassScore]
    bins: list[Bin]
    confusion: list[list[int]]
    """Samples by label (row) and prediction (column); empty with more than 1,024 classes."""

    @property
    def calibration_error(self) -> float:
        """Return the expected calibration error, 0 to 1."""
        gaps = sum(each.samples * abs(each.accuracy - each.confidence) for each in self.bins)
        return gaps / max(self.counts.samples, 1)

    def confusions(self, most: int) -> list[tuple[int, str, str]]:
        """Return the most frequent mistakes: how often, label, prediction."""
        mistakes = [
            (count, self.classes[label].name, self.classes[predicted].name)
            for label, row in enumerate(self.confusion)
            for predicted, count in enumerate(row)
            if count and label != predicted
        ]
        return sorted(mistakes, key=lambda mistake: -mistake[0])[:most]

    def plain(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return {
            "samples": self.counts.samples,
            "skipped": self.counts.skipped,
            "loss": self.counts.mean_loss,
            "top1": self.counts.accuracy,
            "top5": self.counts.accuracy5,
            "calibration_error": self.calibration_error,
            "calibration": [asdict(each) for each in self.bins],
            "classes": [
                {**asdict(each), "accuracy": each.accuracy, "precision": each.precision}
                for each in self.classes
            ],
            "confusion": self.confusion,
        }
