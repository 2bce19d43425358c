"""Count what resampled training reads: bytes read per byte used, on 8 to 512 GPUs.

    python -m bench.streams [--gpus 8 64 512] [--epochs 3]

The lanes of one rank walk through epochs of an ImageNet (1,281,167 images of 110 KB) with 256
images per step and 16 loader workers on each GPU, as training does, but without decoding. Every
image is the same one, in memory; what is counted are the ranges that are asked for.
"""

import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.imagenet.recipes import ImageNet
from rackrun.shards.folder import FolderSource
from rackrun.shards.index import INDEX_FIELDS, Manifest, Shard, Split
from rackrun.shards.source import Range, Stored
from rackrun.shards.writer import write_shard
from rackrun.training.data.pool import TRAIN
from rackrun.training.data.resampled import LanePlan, ResampledStream
from rackrun.training.data.transforms import Prepared, Transforms

IMAGE_BYTES, IMAGES, PER_SHARD = 110_000, 1_281_167, 9000
BATCH, WORKERS = 256, 16  # of each GPU


@dataclass(frozen=True)
class Settings:
    """Count what resampled training reads."""

    gpus: tuple[int, ...] = (8, 64, 512)
    """Numbers of GPUs."""
    epochs: int = 3
    """Epochs of each."""
    images: int = IMAGES
    """Images in the data set."""


class Copies(FolderSource):
    """A data set of one image many times, which counts the bytes that are read."""

    def __init__(self, images: int) -> None:
        super().__init__("memory")
        self.images, self.bytes_read = images, 0
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "one.tar")
            with write_shard(path) as writer:
                self.stored_at = writer.add("image", 0, bytes(IMAGE_BYTES))
                writer.close()
            self._sample = path.read_bytes()[: self.stored_at.length]

    @cached_property
    def manifest(self) -> Manifest:
        """Return the manifest of the data set."""
        sizes = [min(PER_SHARD, self.images - at) for at in range(0, self.images, PER_SHARD)]
        shards = tuple(
            Shard("one.tar", size, size * self.stored_at.length, "0" * 64) for size in sizes
        )
        split = Split(TRAIN, self.images, "one.index.npy", "0" * 64, shards)
        return Manifest(dataset="copies", classes=("image",), splits=(split,))

    @cached_property
    def _rows(self) -> npt.NDArray[np.void]:
        rows = np.zeros(self.images, INDEX_FIELDS)
        rows["shard"], within = np.divmod(np.arange(self.images), PER_SHARD)
        rows["offset"], rows["length"] = within * self.stored_at.length, self.stored_at.length
        rows["image_offset"] = rows["offset"] + np.uint64(self.stored_at.image_offset)
        rows["image_length"], rows["format"] = IMAGE_BYTES, b"jpg"
        rows["crc"] = zlib.crc32(bytes(IMAGE_BYTES))
        return rows

    def index(self, split: str) -> npt.NDArray[np.void]:
        """Return the index, the same for every split."""
        return self._rows

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Yield each range in turn, and count its bytes."""
        for _, _, length in ranges:
            self.bytes_read += length
            yield self._sample * (length // self.stored_at.length)


@dataclass(frozen=True)
class Undecoded(Transforms):
    """Leaves images as they are."""

    def prepared_for_training(self, data: bytes, random: np.random.Generator) -> Prepared:
        """Decode nothing, and leave the slot as it is."""
        return Prepared(0, lambda: lambda out: None)


def main(args: list[str]) -> None:
    """Print a line for each number of GPUs."""
    settings = parse(Settings, "python -m bench.streams", args)
    for gpus in settings.gpus:
        read, used = counted(gpus, settings)
        print(f"{gpus:4} GPUs: {read / used:.2f} bytes read per byte used")


def counted(gpus: int, settings: Settings) -> tuple[int, int]:
    """Return the bytes that the last rank reads in some epochs, and those that it uses."""
    source, transforms = Copies(settings.images), Undecoded(size=1, short_side=1)
    config = ImageNet(data="memory", batch_size=BATCH)
    steps = settings.images // (BATCH * gpus)
    plan = LanePlan(config, source, lambda epoch: transforms, gpus - 1, gpus, steps, WORKERS)
    slots, batches = plan.slots(2, torch.device("cpu")), settings.epochs * steps
    for lane in range(WORKERS):
        stream = ResampledStream(plan, slots, lane)
        for _ in islice(stream, plan.share(0, batches, lane)):
            pass
    return source.bytes_read, batches * BATCH * source.stored_at.length


if __name__ == "__main__":
    run(main)
