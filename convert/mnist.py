"""MNIST: four IDX files, gzipped or not, as they are published.

The images are stored as PNGs: every pixel stays as it is. Sets of the same form, such as Fashion
MNIST, are read as well.
"""

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import ClassVar

from convert.options import Packing
from convert.packing.pack import pack
from convert.packing.plan import TEST
from convert.readers.idx import IdxPair
from convert.readers.records import HELD_OUT, RecordListing
from rackrun.commandline.options import Examples, Positional
from rackrun.errors import UsageError
from rackrun.terminal import say

SIDES, CLASSES = (28, 28), tuple("0123456789")
COUNTS = (60_000, 10_000)
FOLDERS = ("", "raw", "MNIST/raw")  # the latter two are torchvision's
PARTS = {"train": HELD_OUT, "t10k": TEST}


@dataclass(frozen=True)
class MnistFiles:
    """MNIST: train-images-idx3-ubyte, train-labels-idx1-ubyte and the same of t10k."""

    examples: ClassVar[Examples] = (
        ("{prog} downloads data/mnist", "the folder of the four files"),
    )

    source: Positional[Path]
    """Folder with the four files, gzipped or not."""
    out: Positional[Path]
    """Folder for the shards; made if it is missing."""
    packing: Packing = field(default_factory=lambda: Packing(val_percent=0.0))

    def run(self) -> None:
        """Convert it."""
        pack(listing(self.source), self.packing, self.out)


def listing(source: Path) -> RecordListing:
    """List the digits: 60,000 to train on, 10,000 to test on."""
    pairs = [_pair(source, part) for part in PARTS]
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


def _pair(source: Path, part: str) -> IdxPair:
    images, labels = _file(source, f"{part}-images", 3), _file(source, f"{part}-labels", 1)
    return IdxPair(images, labels, SIDES, len(CLASSES))


def _file(source: Path, stem: str, dimensions: int) -> Path:
    """Return the IDX file of that name; UsageError if there is none."""
    if not source.is_dir():
        raise UsageError(f"{source}: there is no such folder; give that with the files of MNIST")
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


if __name__ == "__main__":
    from convert.__main__ import run_script

    run_script("mnist")
