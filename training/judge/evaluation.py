"""The evaluation itself: every sample of a split once, by all ranks together.

Trained, split -> batches of this rank -> logits -> Tally, and a row of CSV per sample
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from rackrun.errors import UsageError
from rackrun.tables import as_csv
from rackrun.terminal import clean
from rackrun.units import first_few
from training.config import Config
from training.data.pool import opened
from training.data.samples import Batch
from training.data.transforms import Transforms
from training.data.validation import Validation
from training.device import set_up
from training.judge.measures import Judgement, Tally
from training.ranks import Ranks
from training.trained import Trained
from training.world import joined

COLUMNS = ("shard", "key", "label", "prediction", "probability", "label_probability")


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
        tally = Tally(len(trained.classes), ranks.device)
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
            if with_rows:
                rows += as_csv(lines(trained.classes, batch, logits))
        judgement = tally.judgement(ranks, trained.classes)
        parts = ranks.all_gather(np.frombuffer(bytes(rows), np.uint8)) if with_rows else []
        table = b"".join([as_csv([COLUMNS]), *(part.tobytes() for part in parts)])
        return Evaluation(judgement, table if with_rows else b"", ranks.first)


def settings(trained: Trained, **chosen: Any) -> Config:
    """Return the settings of an evaluation; precision and layout are those of the training."""
    precision, layout = trained.config.precision, trained.config.channels_last
    return Config(precision=precision, channels_last=layout, **chosen)


def open_split(config: Config, ranks: Ranks, trained: Trained) -> Iterator[Batch]:
    """Yield this rank's batches; raise UsageError unless the data suit the model."""
    source = opened(config)
    _check_classes(trained, list(source.manifest.classes), config.data)
    names = [each.name for each in source.manifest.splits if each.samples]
    if config.eval_split not in names:
        raise UsageError(
            f"{config.data}: no samples in the split {config.eval_split!r}; type --split with one"
            f" of: {', '.join(names)}"
        )
    transforms = partial(_always, trained.transforms)
    return Validation(config, ranks, transforms, source).batches()


def _always(transforms: Transforms, epoch: int) -> Transforms:
    return transforms


def _check_classes(trained: Trained, data_classes: Sequence[str], data: str) -> None:
    """Raise UsageError unless the data have the classes of the model, in its order."""
    if list(data_classes) == trained.classes:
        return
    extra = sorted(set(data_classes) - set(trained.classes))
    missing = sorted(set(trained.classes) - set(data_classes))
    what = "; ".join(
        f"only in the {where}: {_some(names)}"
        for where, names in (("data", extra), ("model", missing))
        if names
    )
    raise UsageError(
        clean(
            f"{data}: its {len(data_classes)} classes are not the {len(trained.classes)} of"
            f" {trained.path} ({what or 'they are in another order'}); type a folder that was"
            " converted with the same classes"
        )
    )


def _some(names: Sequence[str], most: int = 5) -> str:
    return first_few([name[:50] for name in names], most)


def lines(
    classes: Sequence[str], batch: Batch, logits: torch.Tensor
) -> Iterator[tuple[object, ...]]:
    """Yield a row for every sample of a batch, in the order of COLUMNS."""
    shares = logits.softmax(1)
    best = shares.max(1)
    label_shares = shares.gather(1, batch.labels[:, None])[:, 0]
    columns = (each.tolist() for each in (batch.labels, best.indices, best.values, label_shares))
    for (shard, key), label, predicted, share, label_share in zip(
        batch.keys, *columns, strict=True
    ):
        yield shard, key, classes[label], classes[predicted], f"{share:.6f}", f"{label_share:.6f}"
