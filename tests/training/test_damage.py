"""Damaged samples in training: quarantine leaves out exactly them, on both walks, and counts."""

import re
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from rackrun.catdog.model import TASK
from rackrun.catdog.recipes import CatDog
from rackrun.errors import DataError
from rackrun.shards.open import open_source
from rackrun.training.data.open import open_data
from rackrun.training.ranks import Ranks

NAMED = (
    r"left out: /[^: ]+: shapes-train-00000\d\.tar: the image at byte \d+ is damaged"
    r" \(sample train_\d{5}\)\n"
)


@pytest.fixture
def damaged(make_shards: Callable[..., Path]) -> Path:
    """Return 200 training images in three shards, ten with a flipped bit in their pixels."""
    folder = make_shards()
    source = open_source(str(folder))
    shards = source.manifest.split("train").shards
    for row in source.index("train")[5::20]:
        path = folder / shards[int(row["shard"])].name
        data = np.fromfile(path, np.uint8)
        data[int(row["image_offset"]) + int(row["image_length"]) // 2] ^= 2
        data.tofile(path)
    return folder


@pytest.mark.parametrize("exact", [False, True], ids=["resampled", "exact"])
def test_quarantine_leaves_out_what_is_damaged_and_counts_it(damaged, exact, capfd):
    """An epoch without ten images, each named with its shard; the default ends at the first."""
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"))
    options = {"data": str(damaged), "image_size": 16, "batch_size": 8, "workers": 0}
    lenient = CatDog(**options, exact_epochs=exact, bad_samples="quarantine")
    data = open_data(
        lenient, alone, partial(TASK.transforms, lenient), TASK.name, TASK.synthetic_classes
    )
    batches = list(islice(data.training(0), data.epoch_steps))
    left_out = sum(batch.skipped for batch in batches)
    named = len(re.findall(NAMED, capfd.readouterr().err))
    assert 0 < left_out <= named  # the batch after these is read ahead, and its images are named
    if exact:
        assert left_out == 10
        assert sum(len(batch.labels) for batch in batches) == 190
    strict = CatDog(**options, exact_epochs=exact)
    data = open_data(
        strict, alone, partial(TASK.transforms, strict), TASK.name, TASK.synthetic_classes
    )
    with pytest.raises(DataError, match="shapes-train-00000.*the image .* damaged") as observed:
        list(islice(data.training(0), 10 * data.epoch_steps))
    assert str(observed.value).count(str(damaged)) == str(observed.value).count(".tar") == 1
