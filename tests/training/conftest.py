"""A small shard folder of drawn shapes that a small model can learn."""

import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from rackrun.atomic import write_whole
from rackrun.catdog.model import TASK
from rackrun.catdog.recipes import CatDog
from rackrun.contract.files import MANIFEST_NAME
from rackrun.shards.index import (
    Manifest,
    Split,
    index_name,
    serialize_index,
    shard_name,
)
from rackrun.shards.writer import write_shard
from rackrun.training import checkpoint
from tests.lab.data import encoded

torch.set_num_threads(1)  # five workers share the cores: further threads would burn them waiting

SHAPES = ("disc", "box", "cross")
SIDE = 40
MakeShards = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: two of them spin while they wait, for long on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Restore torch's settings, which a run in this process changes."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def make_shards(tmp_path_factory: pytest.TempPathFactory) -> MakeShards:
    """Return a function that makes a shard folder.

    It takes the sizes of the train and val shards, the number of classes, bytes to pack instead of
    images, and labels that the samples have in turn.
    """

    def make(
        train: tuple[int, ...] = (70, 70, 60),
        val: tuple[int, ...] = (20, 17),
        classes: int = 2,
        broken: dict[str, bytes] | None = None,
        labels: tuple[int, ...] = (),
    ) -> Path:
        folder = tmp_path_factory.mktemp("shards")
        turns = labels or tuple(range(classes))
        splits = tuple(
            pack(folder, name, sizes, turns, broken or {})
            for name, sizes in (("train", train), ("val", val))
            if sizes
        )
        names = (*SHAPES, *(f"shape {number}" for number in range(3, classes)))[:classes]
        manifest = Manifest(dataset="shapes", classes=names, splits=splits)
        write_whole(folder / MANIFEST_NAME, manifest.serialize())
        return folder

    return make


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a final.pt of random weights for three shapes."""
    path = tmp_path_factory.mktemp("run") / "final.pt"
    config = CatDog(image_size=24, width=4, device="cpu")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = TASK.model(config, len(SHAPES))
    described = {"task": "catdog", "classes": [*SHAPES], "config": asdict(config)}
    preparation = asdict(TASK.transforms(config, 0))
    checkpoint.write(path, {**described, "preparation": preparation, "model": model.state_dict()})
    return path


@pytest.fixture(scope="session")
def shapes(make_shards: MakeShards) -> Path:
    """Return shards of 200 training and 37 validation images of two shapes."""
    return make_shards()


def pack(
    folder: Path,
    split: str,
    sizes: tuple[int, ...],
    turns: tuple[int, ...],
    broken: dict[str, bytes],
) -> Split:
    """Write the shards and the index of a split; keys are <split>_<number>."""
    rows, shards, number = [], [], 0
    for shard, size in enumerate(sizes):
        with write_shard(folder / shard_name("shapes", split, shard)) as writer:
            for _ in range(size):
                key, label = f"{split}_{number:05d}", turns[number % len(turns)]
                image = broken.get(key) or draw(label, seed=number + 10_000 * (split == "val"))
                position = writer.add(key, label, image)
                crc = zlib.crc32(image)
                rows.append((shard, *position, len(image), label, SIDE, SIDE, crc, b"jpg"))
                number += 1
            shards.append(writer.close())
    data = serialize_index(rows)
    write_whole(folder / index_name("shapes", split), data)
    digest = hashlib.sha256(data).hexdigest()
    return Split(split, number, index_name("shapes", split), digest, tuple(shards))


def draw(label: int, seed: int) -> bytes:
    """Return a JPEG of a shape on noise."""
    random = np.random.default_rng(seed)
    noise = random.integers(0, 120, (SIDE, SIDE, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    pen = ImageDraw.Draw(picture)
    left, top = (int(edge) for edge in random.integers(2, 14, 2))
    right, bottom = left + int(random.integers(16, 24)), top + int(random.integers(16, 24))
    color = tuple(int(part) for part in random.integers(140, 256, 3))
    if label % 3 == 0:
        pen.ellipse((left, top, right, bottom), fill=color)
    elif label % 3 == 1:
        pen.rectangle((left, top, right, bottom), fill=color)
    else:
        pen.line((left, top, right, bottom), fill=color, width=4)
        pen.line((left, bottom, right, top), fill=color, width=4)
    return encoded(picture, quality=90)


def settings(data: Path, folder: Path, **options: Any) -> CatDog:
    defaults = {
        "data": str(data),
        "run_folder": str(folder),
        "image_size": 24,
        "width": 6,
        "epochs": 4,
        "batch_size": 20,
        "crop_area": 0.7,
        "warmup_epochs": 0.5,
        "label_smoothing": 0.0,
        "ema_decay": 0.9,
        "workers": 0,
        "tensorboard": False,
        "device": "cpu",
    }
    return CatDog(**{**defaults, **options})


def same_weights(run: Path, other: Path) -> bool:
    """Return whether the final weights of two runs are the same, bit for bit."""
    first, second = (checkpoint.read(folder / "final.pt")["model"] for folder in (run, other))
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)
