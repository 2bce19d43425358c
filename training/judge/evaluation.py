"""The evaluation of a model: every sample of a split once, by all ranks together.

    Trained, split -> batches of this rank -> logits -> a row of CSV per sample, and
    logits, labels -> Tally: sums on the device -> summed over ranks -> Judgement: plain numbers

Calibration is the expected calibration error of Guo et al., "On Calibration of Modern Neural
Networks", ICML 2017: 15 bins of equal width over the probability of the predicted class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from rackrun.errors import UsageError
from rackrun.shards.index import Manifest
from rackrun.tables import as_csv
from rackrun.terminal import clean, say
from rackrun.training.config import Config
from rackrun.training.counts import (
    Confusion,
    Counter,
    Counts,
    NoAnswers,
    answered,
    as_counts,
    evaluation_sums,
)
from rackrun.training.data.pool import conversion_of, opened
from rackrun.training.data.samples import Batch
from rackrun.training.data.transforms import Transforms
from rackrun.training.data.validation import Validation
from rackrun.training.device import set_up
from rackrun.training.ranks import Ranks
from rackrun.training.trained import Trained
from rackrun.training.world import joined
from rackrun.units import first_few, plural

COLUMNS = ("shard", "key", "label", "prediction", "probability", "label_probability")
BINS = 15


class Evaluation(NamedTuple):
    """The result of an evaluation, the same on all ranks."""

    judgement: Judgement
    table: bytes
    """CSV with a row per sample, in the order of the index; empty unless asked for."""
    first: bool
    """True on the rank that writes for all."""


def evaluate(trained: Trained, config: Config, flip: bool, with_rows: bool) -> Evaluation:
    """Return the evaluation of the model on the data by all ranks of the world.

    With `flip`, of the mean of the outputs for an image and its mirror image.
    """
    with joined(config) as ranks:
        compute = set_up(config, ranks)
        batches = open_split(config, ranks, trained)
        trained = replace(trained, model=compute.placed(trained.model), device=ranks.device)
        tally, no_answers = Tally(len(trained.classes), ranks.device), NoAnswers()
        rows = bytearray()
        for batch in batches:
            if not len(batch.labels):
                tally.skip(batch)
                continue
            with torch.inference_mode():
                logits = compute.logits(
                    trained.model, trained.transforms.normalised, batch.images, flip
                )
            tally.add(logits, batch)
            no_answers.add(logits, batch.keys)
            if with_rows:
                rows += as_csv(lines(trained.classes, batch, logits))
        judgement = tally.judgement(ranks, trained.classes)
        if (remark := no_answers.of_all(ranks)) and ranks.first:
            say(remark)
        parts = ranks.all_gather(np.frombuffer(bytes(rows), np.uint8)) if with_rows else []
        table = b"".join([as_csv([COLUMNS]), *(part.tobytes() for part in parts)])
        return Evaluation(judgement, table if with_rows else b"", ranks.first)


def settings(trained: Trained, **chosen: Any) -> Config:
    """Return the settings of an evaluation; precision and layout are those of the training."""
    precision, layout = trained.config.precision, trained.config.channels_last
    return Config(precision=precision, channels_last=layout, **chosen)


def open_split(config: Config, ranks: Ranks, trained: Trained) -> Iterator[Batch]:
    """Yield this rank's batches, with the numbers that the model gives their classes.

    UsageError unless the data suit the model: their classes are some of its own, by name.
    """
    source = opened(config)
    data_classes = source.manifest.classes
    refuse_other_classes(trained, data_classes, config.data)
    names = [each.name for each in source.manifest.splits if each.samples]
    if config.eval_split not in names:
        raise UsageError(
            f"{config.data}: no samples in the split {config.eval_split!r}; type --split with one"
            f" of: {', '.join(names)}"
        )
    if ranks.first and (remark := _other_conversion(trained, source.manifest, config.data)):
        say(remark)
    transforms = partial(_of_every_epoch, trained.transforms)
    batches = Validation(config, ranks, transforms, source).batches()
    if list(data_classes) == trained.classes:
        return batches
    numbers = torch.tensor([trained.classes.index(name) for name in data_classes])
    numbers = numbers.to(ranks.device)
    return (batch._replace(labels=numbers[batch.labels]) for batch in batches)


def _other_conversion(trained: Trained, manifest: Manifest, data: str) -> str:
    theirs, ours = conversion_of(manifest).described(), trained.transforms.conversion.described()
    if theirs == ours:
        return ""
    return (
        f"{data}: converted with {theirs or 'unchanged images'}, those that {trained.path} was"
        f" trained on with {ours or 'unchanged ones'}; to evaluate it on images like those, convert"
        " with the same options"
    )


def _of_every_epoch(transforms: Transforms, epoch: int) -> Transforms:  # sent to loader workers
    return transforms


def refuse_other_classes(trained: Trained, data_classes: Sequence[str], data: str) -> None:
    """Raise UsageError for classes of the data that the model does not have."""
    extra = sorted(set(data_classes) - set(trained.classes))
    if extra:
        raise UsageError(
            clean(
                f"{data}: {plural(len(extra), 'class', 'classes')} that {trained.path} does not"
                f" have: {first_few([name[:50] for name in extra], 5)}; type a folder with classes"
                f" of the model: {first_few([name[:50] for name in trained.classes], 5)}"
            )
        )


def lines(
    classes: Sequence[str], batch: Batch, logits: torch.Tensor
) -> Iterator[tuple[object, ...]]:
    """Yield a row for every sample of a batch, in the order of COLUMNS.

    Of one for which the output is not finite, there is neither prediction nor probability.
    """
    shares = logits.softmax(1)
    best = shares.max(1)
    label_shares = shares.gather(1, batch.labels[:, None])[:, 0]
    columns = (each.tolist() for each in (batch.labels, best.indices, best.values, label_shares))
    for (shard, key), label, predicted, share, label_share in zip(
        batch.keys, *columns, strict=True
    ):
        answer = (classes[predicted], f"{share:.6f}", f"{label_share:.6f}")
        yield shard, key, classes[label], *(answer if math.isfinite(share) else ("", "", ""))


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
        has_answer = answered(logits)
        confidence, predicted = logits.softmax(1).max(1)
        confidence = confidence.where(has_answer, 0).double()
        right, one = (predicted == labels) & has_answer, has_answer.double()
        self._classes[0].index_add_(0, labels, torch.ones_like(one))
        self._classes[1].index_add_(0, labels, right.double())
        self._classes[2].index_add_(0, predicted, one)
        # Bin m holds the confidences in ((m - 1) / BINS, m / BINS].
        bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
        self._bins.index_add_(1, bins, torch.stack([one, confidence, right.double()]))

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
        """Return the recall: the share of its samples predicted as it; None without samples."""
        return self.right / self.samples if self.samples else None

    @property
    def precision(self) -> float | None:
        """Return the share of the predictions of it that were right; None without predictions."""
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
    """The results of an evaluation, as plain numbers."""

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
