"""The evaluation of a model: every sample of a split once, by all ranks together.

Trained, split -> batches of this rank -> logits -> Table -> Scores, and a row of CSV per sample
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from rackrun.data_location import are_plain_tars
from rackrun.errors import UsageError
from rackrun.shards.index import Manifest
from rackrun.shards.open import open_source
from rackrun.shards.resize import Resize
from rackrun.tables import as_csv
from rackrun.terminal import clean, say
from rackrun.training.config import Config
from rackrun.training.data.loader import Loader
from rackrun.training.data.plain import PlainValidation
from rackrun.training.data.ring import Batch
from rackrun.training.data.tars import NOT_VERIFIED, Labels
from rackrun.training.data.validation import Validation
from rackrun.training.device import set_up
from rackrun.training.ranks import Ranks
from rackrun.training.scores import ClassScore, Scores, Table
from rackrun.training.trained import Trained
from rackrun.training.world import joined
from rackrun.units import first_few, plural

COLUMNS = ("shard", "key", "label", "prediction", "probability", "label_probability")


class Evaluation(NamedTuple):
    """The result of an evaluation, the same on all ranks."""

    scores: Scores
    classes: list[ClassScore]
    table: bytes
    """CSV with a row per sample, in the order of the index; empty unless asked for."""
    first: bool
    """True on the rank that writes for all."""

    @property
    def confusion(self) -> list[list[int]]:
        """Return samples by label (row) and prediction; [] with more than 1,024 classes."""
        return [] if self.scores.confusion is None else self.scores.confusion.tolist()

    def mistakes(self, most: int) -> list[tuple[int, str, str]]:
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
        counts = self.scores.counts
        return {
            "samples": counts.samples,
            "skipped": counts.skipped,
            "loss": counts.mean_loss,
            "top1": counts.accuracy,
            "top5": counts.accuracy5,
            "calibration_error": self.scores.calibration_error,
            "calibration": [asdict(each) for each in self.scores.bins],
            "classes": [
                {**asdict(each), "accuracy": each.accuracy, "precision": each.precision}
                for each in self.classes
            ],
            "confusion": self.confusion,
        }


def evaluate(trained: Trained, config: Config, flip: bool, with_rows: bool) -> Evaluation:
    """Return the evaluation of the model on the data by all ranks of the world.

    With `flip`, of the mean of the outputs for an image and its mirror image.
    """
    with joined(config) as ranks:
        compute = set_up(config, ranks)
        batches = open_split(config, ranks, trained)
        trained = replace(trained, model=compute.placed(trained.model), device=ranks.device)
        table = Table(len(trained.classes))
        for batch in batches:
            if not len(batch.labels):
                table.skip(batch)
                continue
            with torch.inference_mode():
                logits = compute.logits(
                    trained.model, trained.transforms.normalized, batch.images, flip
                )
            table.add(logits, batch)
        scores = table.scores(ranks)
        if scores.remark and ranks.first:
            say(scores.remark)
        csv_table = b""
        if with_rows:
            own = as_csv(lines(trained.classes, table))
            csv_table = b"".join([as_csv([COLUMNS]), *ranks.gather(own)])
        return Evaluation(scores, scores.by_class(trained.classes), csv_table, ranks.first)


def settings(trained: Trained, **chosen: Any) -> Config:
    """Return the settings of an evaluation; precision and layout are those of the training."""
    precision, layout = trained.config.precision, trained.config.channels_last
    return Config(precision=precision, channels_last=layout, **chosen)


def open_split(config: Config, ranks: Ranks, trained: Trained) -> Iterator[Batch]:
    """Yield this rank's batches, with the numbers that the model gives their classes.

    UsageError unless the data suit the model: their classes are some of its own, by name.
    """
    if are_plain_tars(config.data):  # whose labels are the model's classes, by number or name
        if ranks.first:
            say(NOT_VERIFIED)
        plain = replace(config, eval_data=config.data)
        labels = Labels(tuple(trained.classes), trained.config.label_field)
        return PlainValidation(Loader(plain, ranks), trained.transforms, labels).batches()
    source = open_source(config.data)
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
    batches = Validation(Loader(config, ranks), trained.transforms, [source]).batches()
    if list(data_classes) == trained.classes:
        return batches
    numbers = torch.tensor([trained.classes.index(name) for name in data_classes])
    numbers = numbers.to(ranks.device)
    return (batch._replace(labels=numbers[batch.labels]) for batch in batches)


def _other_conversion(trained: Trained, manifest: Manifest, data: str) -> str:
    theirs, ours = Resize.of(manifest).described(), trained.transforms.conversion.described()
    if theirs == ours:
        return ""
    return (
        f"{data}: converted with {theirs or 'unchanged images'}, those that {trained.path} was"
        f" trained on with {ours or 'unchanged ones'}; to evaluate it on images like those, convert"
        " with the same options"
    )


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


def lines(classes: Sequence[str], table: Table) -> Iterator[tuple[object, ...]]:
    """Yield a row for every sample of this rank, in the order of COLUMNS.

    Of one for which the output is not finite, there is neither prediction nor probability.
    """
    for (shard, key), row in zip(table.keys, table.rows().tolist(), strict=True):
        label, predicted, loss, _, share, _, has_answer = row
        answer = (classes[int(predicted)], f"{share:.6f}", f"{math.exp(-loss):.6f}")
        yield shard, key, classes[int(label)], *(answer if has_answer else ("", "", ""))
