"""Walks through a data set: complete where they must be, repeatable everywhere."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rackrun.catdog.model import TASK
from rackrun.catdog.recipes import CatDog
from rackrun.errors import DataError
from rackrun.shards.open import open_source
from rackrun.training.data.open import Data, open_data
from rackrun.training.data.ring import Batch
from rackrun.training.data.samples import stored_samples
from rackrun.training.data.transforms import Transforms
from rackrun.training.ranks import Ranks
from tests.lab.data import drawn, encoded
from tests.lab.run import run, write


def settings(data: Path | str, **options: object) -> CatDog:
    return CatDog(**{"data": str(data), "image_size": 16, "batch_size": 8, "workers": 0, **options})


def walk(config: CatDog, rank: int = 0, world: int = 1) -> Data:
    return open_data(
        config,
        Ranks(rank, world, rank, world, torch.device("cpu")),
        [TASK.transforms(config, 0)],
        TASK.name,
        TASK.synthetic_classes,
    )


def fingerprints(batches: Iterator[Batch]) -> list[bytes]:
    """Return each image as the model sees it; no two images of the set are alike."""
    return [image.numpy().tobytes() for batch in batches for image in batch.images]


@pytest.fixture(scope="module")
def every_validation_picture(shapes: Path) -> list[bytes]:
    config = settings(shapes)
    prepare = TASK.transforms(config, 0).for_evaluation
    result = stored_samples(open_source(str(shapes)), "val", np.arange(37))
    pictures = [prepare(sample.image).transpose(2, 0, 1) for _, sample in result]
    assert len({picture.tobytes() for picture in pictures}) == 37
    return [picture.tobytes() for picture in pictures]


@pytest.mark.parametrize(
    ("world", "batch_size", "workers"), [(1, 8, 0), (3, 64, 0), (40, 1, 0), (2, 16, 1), (2, 16, 3)]
)
def test_validation_has_every_sample_once(
    shapes, every_validation_picture, world, batch_size, workers
):
    """Whatever the number of ranks, workers and the batch size: nothing missing, double, or
    padded. More workers than batches are fine."""
    config = settings(shapes, batch_size=batch_size, workers=workers)
    parts = [fingerprints(walk(config, rank, world).evaluation()) for rank in range(world)]
    assert [fingerprint for part in parts for fingerprint in part] == every_validation_picture


@pytest.mark.parametrize("workers", [0, 2])
def test_resampled_images_follow_from_seed_rank_and_start(shapes, workers):
    """The same command draws the same images again; a resume, a rank and a seed draw others."""

    def images(seed: int = 0, rank: int = 0, start: int = 0) -> bytes:
        config = settings(shapes, workers=workers, seed=seed, exact_epochs=False)
        batches = islice(walk(config, rank, 2).training(start), 4)
        return b"".join(
            batch.labels.numpy().tobytes() + batch.images.numpy().tobytes() for batch in batches
        )

    assert images() == images()
    assert len({images(), images(seed=1), images(rank=1), images(start=3)}) == 4


def test_resampled_shards_come_equally_often(shapes):
    """With replacement: none is missing for long, and none comes more often than others."""
    config = settings(shapes, batch_size=200, exact_epochs=False, shuffle_buffer=1)
    counts = Counter(
        shard for batch in islice(walk(config).training(0), 60) for shard, _ in batch.keys
    )
    sizes = {
        shard.name: shard.samples
        for shard in open_source(str(shapes)).manifest.split("train").shards
    }
    draws = [counts[name] / size for name, size in sizes.items()]
    assert max(draws) < 1.6 * min(draws)


def test_training_sees_what_was_dropped_and_relabeled(tmp_path):
    """No image of the version before, and no label of it, in either way of reading."""
    images = {
        f"images/{name}/{name}_{n}.png": drawn(f"{name}{n}") for name in "ab" for n in range(8)
    }
    write(tmp_path, images)
    for line in (
        "convert folder images shards --val-percent 0",
        "convert drop shards a_3 b_5",
        "convert relabel shards a_1=b",
    ):
        assert run(f"rackrun {line}", tmp_path).code == 0, line
    for exact in (True, False):
        config = settings(tmp_path / "shards", exact_epochs=exact, batch_size=7)
        seen = {
            key: label
            for batch in islice(walk(config).training(0), 20)
            for (_, key), label in zip(batch.keys, batch.labels.tolist(), strict=True)
        }
        assert seen == {
            f"{name}_{n}": int(name == "b" or (name, n) == ("a", 1))
            for name in "ab"
            for n in range(8)
            if (name, n) not in {("a", 3), ("b", 5)}
        }


def test_folders_that_are_not_one_data_set_are_not_joined(tmp_path):
    """A version beside another, other conversions, other classes: one line, and nothing is read."""
    for folder, names in (("images", "ab"), ("others", "ab"), ("third", "cd")):
        write(tmp_path, {f"{folder}/{n}/{folder}.png": drawn(f"{folder}{n}") for n in names})
    for line in ("images shards", "others small --short-side 8", "third named"):
        command = f"rackrun convert folder {line} --val-percent 0"
        assert run(command, tmp_path).code == 0, line
    for other, reason in (
        ("shards@1", "the same data set, or another version of it"),
        ("small", "converted with other options"),
        ("named", "other classes"),
    ):
        with pytest.raises(DataError, match=reason):
            walk(settings(f"{tmp_path / 'shards'}::{tmp_path / other}"))


@pytest.mark.parametrize("options", [{"exact_epochs": False}, {}], ids=["drawn", "exact"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_beyond_the_last_epoch_fit_its_memory(shapes, workers, options):
    """Workers read ahead of the end of a run, where images would have grown further."""
    config = settings(shapes, workers=workers, epochs=2, batch_size=40, **options)
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"))
    growing = [Transforms(16), Transforms(20)]
    batches = open_data(config, alone, growing, TASK.name, 2).training(0)
    assert [batch.images.shape[2] for batch in islice(batches, 15)] == [16] * 5 + [20] * 10


@pytest.mark.parametrize("options", [{"exact_epochs": False}, {}], ids=["drawn", "exact"])
def test_an_image_is_changed_in_another_way_in_each_epoch(make_shards, options):
    """The only sample of a data set is another crop in each epoch, and with another seed."""
    data = make_shards(train=(1,), val=(1,))
    crops = [
        batch.images.numpy().tobytes()
        for seed in (0, 1)
        for batch in islice(walk(settings(data, batch_size=1, seed=seed, **options)).training(0), 5)
    ]
    assert len(set(crops)) == 10


def broken_jpeg() -> bytes:
    return encoded(Image.new("RGB", (40, 40)))[:200]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_ends_the_run_by_name(make_shards, workers):
    """The default: shard and key are named, from a worker too, and what to type."""
    folder = make_shards(broken={"val_00030": broken_jpeg(), "train_00003": broken_jpeg()})
    data = walk(settings(folder, workers=workers))
    with pytest.raises(DataError) as caught:
        list(data.evaluation())
    assert "shapes-val-000001.tar: val_00030: " in str(caught.value)
    assert "type --bad-samples quarantine" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="shapes-train-000000.tar: train_00003"):
        list(islice(data.training(0), 1000))


def test_quarantine_leaves_a_broken_image_out_and_counts_it(make_shards, capfd):
    """All others are there, the number left out is known, each is named, full batches stay full."""
    broken = {"val_00030": broken_jpeg(), "val_00002": b"no picture"}
    broken |= {f"train_{number:05d}": broken_jpeg() for number in range(0, 200, 2)}
    folder = make_shards(broken=broken)
    data = walk(
        settings(folder, bad_samples="quarantine", bad_samples_limit=1000, exact_epochs=False)
    )
    batches = list(data.evaluation())
    assert sum(len(batch.labels) for batch in batches) == 35
    assert sum(batch.skipped for batch in batches) == 2
    errors = capfd.readouterr().err
    assert "left out: shapes-val-000000.tar: val_00002" in errors
    training = list(islice(data.training(0), 10))
    assert {len(batch.labels) for batch in training} == {8}
    assert sum(batch.skipped for batch in training) > 20


def test_the_bound_is_that_of_a_rank(make_shards):
    """However many loader workers it has, and however often it reads the same broken image."""
    broken = {f"val_{number:05d}": b"no picture" for number in (0, 1, 8, 9)}  # of two batches
    folder = make_shards(broken=broken)
    data = walk(settings(folder, bad_samples="quarantine", bad_samples_limit=4, workers=2))
    for _ in range(3):
        assert sum(batch.skipped for batch in data.evaluation()) == 4
    data = walk(settings(folder, bad_samples="quarantine", bad_samples_limit=3, workers=2))
    with pytest.raises(DataError, match="4 images are left out; .* --bad-samples-limit 3"):
        list(data.evaluation())


def test_the_grid_is_spread_over_the_validation_set(shapes, every_validation_picture):
    """Images to look at come from everywhere in the set, each once, fewer if there are fewer."""
    grid = walk(settings(shapes)).grid(5)
    assert grid is not None
    assert fingerprints(iter([grid])) == [every_validation_picture[n] for n in (0, 7, 14, 22, 29)]
    everything = walk(settings(shapes)).grid(50)
    assert everything is not None
    assert len(everything.labels) == 37


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, (20, 20, 20)),
        ({"only_classes": "0,2"}, (25, 0, 25)),
        ({"max_train_samples": 10}, (3, 3, 3)),
    ],
    ids=["all", "of two classes", "the first samples"],
)
def test_balanced_classes_come_equally_often(make_shards, options, shares):
    """--class-weights balanced: 40, 10 and 10 samples come 20 times each in an epoch of 60."""
    folder = make_shards(train=(30, 30), val=(), classes=3, labels=(0, 0, 0, 0, 1, 2))
    data = walk(settings(folder, class_weights="balanced", exact_epochs=True, **options))
    epoch = islice(data.training(0), data.steps.per_epoch)
    drawn = Counter(label for batch in epoch for label in batch.labels.tolist())
    assert [drawn[label] for label in range(3)] == list(shares)
