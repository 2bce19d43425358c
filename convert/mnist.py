"""MNIST: four files of digits in the format IDX, gzipped or not.

They are small enough to keep in memory. Each image becomes a PNG when its turn comes: every pixel
stays as it is. Sets of the same form, such as Fashion MNIST, are read as well.
"""

import io
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import ClassVar

import rackrun  # isort: skip # noqa: F401 - a script goes on as ./run-local, and lacks numpy
import numpy as np

from rackrun.commandline.options import Examples, Positional
from rackrun.convert.options import Packing
from rackrun.convert.packing.pack import pack
from rackrun.convert.readers.records import (
    HELD_OUT,
    TEST,
    Record,
    RecordListing,
    as_text,
    open_archive,
    reading,
)
from rackrun.errors import DataError, UsageError
from rackrun.terminal import say

CLASSES = tuple("0123456789")
COUNTS = (60_000, 10_000)
FOLDERS = ("", "raw", "MNIST/raw")  # the latter two are torchvision's
PARTS = {"train": HELD_OUT, "t10k": TEST}
OF_BYTES = 0x800  # magic of a file of bytes, without its number of dimensions
GZIP = b"\x1f\x8b"
LARGEST = 1 << 30  # bytes: MNIST has 47 million
SIDES = (28, 28)
ANEW = "download it again"


@dataclass(frozen=True)
class MnistFiles:
    """MNIST: train-images-idx3-ubyte, train-labels-idx1-ubyte and the same of t10k."""

    examples: ClassVar[Examples] = (
        ("{prog} downloads data/mnist", "the folder of the four files"),
    )

    source: Positional[Path]
    """Folder with the four files, gzipped or not."""
    out: Positional[Path]
    """Folder for the shards; created if it is missing."""
    packing: Packing = field(default_factory=lambda: Packing(val_percent=0.0))

    def run(self) -> None:
        """Convert it."""
        pack(listing(self.source), self.packing, self.out)


def listing(source: Path) -> RecordListing:
    """List the digits: 60,000 to train on, 10,000 to test on."""
    pairs = [
        IdxPair(_file(source, f"{part}-images", 3), _file(source, f"{part}-labels", 1))
        for part in PARTS
    ]
    counts = tuple(pair.count for pair in pairs)
    if counts != COUNTS:
        say(f"{source}: {counts[0]:,} and {counts[1]:,} images; MNIST has 60,000 and 10,000")
    records = chain.from_iterable(
        pair.records(part, PARTS[part], number)
        for number, (part, pair) in enumerate(zip(PARTS, pairs, strict=True))
    )
    return RecordListing(
        "mnist", CLASSES, tuple(pairs), records, as_published=True, usual=("gray",)
    )


def _file(source: Path, stem: str, dimensions: int) -> Path:
    if not source.is_dir():
        raise UsageError(f"{source}: no such folder; give the folder with the files of MNIST")
    for folder in FOLDERS:
        for mark in (f"-idx{dimensions}", f".idx{dimensions}"):
            for suffix in ("", ".gz"):
                path = source / folder / f"{stem}{mark}-ubyte{suffix}"
                if path.is_file():
                    return path
    raise UsageError(
        f"{source}: no {stem}-idx{dimensions}-ubyte or {stem}-idx{dimensions}-ubyte.gz in it; give "
        "the folder with the four files of MNIST"
    )


class IdxPair:
    """A file of images and the file of their labels; a record's offset is an image's number."""

    def __init__(self, images: Path, labels: Path) -> None:
        """Read both files; DataError unless they are images of 28 x 28 and labels of 10 classes."""
        self.name = as_text(images.name)
        self._pixels, self._labels = _idx(images, 3), _idx(labels, 1)
        self.count = len(self._pixels)
        if self.count != len(self._labels):
            raise DataError(
                f"{labels}: {len(self._labels):,} labels for {self.count:,} images; {ANEW}"
            )
        (wrong,) = (self._labels >= len(CLASSES)).nonzero()
        if wrong.size:
            label = self._labels[wrong[0]]
            raise DataError(f"{labels}: label {wrong[0]:,} is {label}, not 0 to 9")

    def records(self, prefix: str, split: str, container: int) -> Iterator[Record]:
        """Yield a record per image; keys are the prefix and its number."""
        size = math.prod(SIDES)
        for number, label in enumerate(self._labels.tolist()):
            name = f"{self.name}/{number}.png"
            yield Record(
                f"{prefix}_{number:05d}", label, split, name, container, number, size, size
            )

    def read(self, record: Record, start: int = 0) -> bytes:
        """Return the image of a record as a PNG."""
        from PIL import Image

        stored = io.BytesIO()
        Image.fromarray(self._pixels[record.offset]).save(stored, "PNG")
        return stored.getvalue()[start:]


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the bytes of an IDX file by its dimensions; DataError for any other file.

    It begins with a magic number and the dimensions, each of 32 bits, big-endian.
    """
    with reading(path), os.fdopen(open_archive(path), "rb") as file:
        data = file.read(LARGEST + 1)
    if data.startswith(GZIP):
        unpack = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            data = unpack.decompress(data, LARGEST + 1)
        except zlib.error as error:
            raise DataError(f"{path}: damaged: {error}; {ANEW}") from None
        if not (unpack.eof or len(data) > LARGEST):
            raise DataError(f"{path}: damaged: cut off; {ANEW}")
    if len(data) > LARGEST:
        raise DataError(f"{path}: over {LARGEST:,} bytes: not a file of MNIST")
    magic, head_bytes = OF_BYTES + dimensions, 4 * (1 + dimensions)
    found = int.from_bytes(data[:4], "big")
    if len(data) < head_bytes or found != magic:
        raise DataError(f"{path}: begins with {found}, an IDX file of this kind with {magic}")
    sizes = np.frombuffer(data, ">u4", dimensions, offset=4).tolist()
    if sizes[1:] not in ([], [*SIDES]):
        raise DataError(f"{path}: images of {sizes[1]}x{sizes[2]}, not {SIDES[0]}x{SIDES[1]}")
    promised = head_bytes + math.prod(sizes)
    if len(data) != promised:
        raise DataError(f"{path}: {len(data):,} bytes, its header promises {promised:,}; {ANEW}")
    return np.frombuffer(data, np.uint8, offset=head_bytes).reshape(sizes)
