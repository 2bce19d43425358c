"""Exact copies among the stored images of a data set.

Equal bytes have equal lengths and CRC-32s, and the index has both: as one number of 64 bits an
image, sorted, they give the candidates. Only candidates are read again and compared by digest, so
that two images whose checksums collide by chance are never taken for copies. For the images of a
source, which only have to stay together, the numbers do.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import chain, pairwise
from typing import NamedTuple
from zlib import crc32

import numpy as np

from rackrun.convert.packing.workers import in_parallel, working_on
from rackrun.convert.readers.record_table import NO_CRC, RecordTable
from rackrun.convert.readers.records import MAX_IMAGE_BYTES, TRAIN, Container, ImageDefect
from rackrun.shards.index import Shard
from rackrun.shards.samples import NAME_BYTES, key_of
from rackrun.shards.source import Stored
from rackrun.shards.writer import BLOCK
from rackrun.units import first_few, plural

LEAK, TWO_CLASSES, COPY = "leak", "two classes", "copy"
NAMED = 3  # leaks that a message names
END_BYTES = 16 << 10  # of an image: they tell nearly all of equal length apart
READ_AT_ONCE = 64  # images


class SplitRows(NamedTuple):
    """A split: its shards, and rows of its index, all or some."""

    split: str
    shards: Sequence[Shard]
    rows: np.ndarray


class NamedImage(NamedTuple):
    """An image by the name that people know it by."""

    name: str
    split: str
    shard: int
    """Number of its shard."""
    label: int


ReadRange = Callable[[Shard, int, int], Stored]
"""Returns the bytes of a shard, from an offset on."""

NameImage = Callable[[Shard, str], str]
"""Returns the name of an image for the report, by its shard and key."""


def copies(
    splits: Sequence[SplitRows],
    classes: Sequence[str],
    read: ReadRange,
    name_image: NameImage = lambda shard, key: f"{shard.name}/{key}",
    before: Sequence[SplitRows] = (),
) -> list[ImageDefect]:
    """Return a finding for each image that is a copy of one before it, in train if there is one.

    Of pairs that are both in the shards of `before`, the version that others join, nothing is said.
    """
    old = {part.split: len(part.shards) for part in before}
    findings = list[ImageDefect]()
    for group in _groups(splits, read, name_image):
        first, *others = sorted(group, key=lambda image: (image.split != TRAIN, image.split))
        for image in others:
            if not any(each.shard >= old.get(each.split, 0) for each in (image, first)):
                continue
            if image.split != first.split:
                findings.append(ImageDefect(image.name, LEAK, f"{first.name} in {first.split}"))
            elif image.label != first.label:
                detail = f"{first.name} in class {classes[first.label]}"
                findings.append(ImageDefect(image.name, TWO_CLASSES, detail))
            else:
                findings.append(ImageDefect(image.name, COPY, first.name))
    return findings


def _groups(
    splits: Sequence[SplitRows], read: ReadRange, name_image: NameImage
) -> Iterator[list[NamedImage]]:
    """Yield the images that have the same bytes, in the order of the rows."""
    marks = np.sort(np.concatenate([image_marks(each.rows) for each in splits]))
    repeated = np.unique(marks[1:][marks[1:] == marks[:-1]])
    groups = defaultdict[bytes, list[NamedImage]](list)
    for split, shards, rows in splits:
        for row in rows[np.isin(image_marks(rows), repeated)]:
            shard = shards[row["shard"]]
            # The header in front of the image has its key.
            start, length = int(row["image_offset"]), int(row["image_length"])
            data = memoryview(read(shard, start - BLOCK, BLOCK + length))
            header = bytes(data[:NAME_BYTES]).rstrip(b"\0")
            name = name_image(shard, key_of(header.decode("utf-8", "backslashreplace")))
            image = NamedImage(name, split, int(row["shard"]), int(row["label"]))
            groups[sha256(data[BLOCK:]).digest()].append(image)
    return (group for group in groups.values() if len(group) > 1)


def leaks_refused(findings: Iterable[ImageDefect]) -> str:
    """Return why a data set with these findings is refused; empty without a leak."""
    names = [f"{each.name} = {each.detail}" for each in findings if each.kind == LEAK]
    if not names:
        return ""
    return (
        f"{plural(len(names), 'image')} also in another split, so results on them are not those on "
        f"unseen images: {first_few(names, NAMED)}; take them out of the source and add --force, "
        "or add --allow leaks"
    )


def image_marks(rows: np.ndarray) -> np.ndarray:
    """Return CRC-32 and length of each row's image as one number."""
    return _as_marks(rows["crc"], rows["image_length"])


def marks_of_copies(
    table: RecordTable,
    numbers: np.ndarray,
    containers: Sequence[Container],
    stored: np.ndarray,
    processes: int,
) -> np.ndarray:
    """Return CRC-32 and length of these images as one number; 0 for those that have no copy.

    A copy is among them, or among those with the marks `stored`. Where a container knows no CRC-32,
    images that are as long as others are read: their ends first, then the whole of those that end
    alike.
    """
    rows = table.rows[numbers]
    sizes, is_unknown = rows["size"], (rows["crc"] == NO_CRC) & (rows["size"] <= MAX_IMAGE_BYTES)
    marks = _as_marks(np.maximum(rows["crc"], 0), sizes)
    is_stored_size = np.isin(sizes, stored & np.uint64(0xFFFFFFFF))
    for done_bytes, most_bytes in pairwise((0, END_BYTES, MAX_IMAGE_BYTES)):
        is_alike = _repeated(marks) | is_stored_size
        places = np.flatnonzero(is_unknown & is_alike & (sizes > done_bytes))
        crcs = _read_crcs(table, numbers[places], containers, most_bytes, processes)
        marks[places] = _as_marks(crcs, sizes[places])
    return np.where(_repeated(marks) | np.isin(marks, stored), marks, np.uint64(0))


def _read_crcs(
    table: RecordTable,
    numbers: np.ndarray,
    containers: Sequence[Container],
    most_bytes: int,
    processes: int,
) -> np.ndarray:
    """Return the CRC-32 of the last bytes of each of these images."""

    def read(start: int) -> list[int]:
        crcs = []
        for number in numbers[start : start + READ_AT_ONCE]:
            record = table[number]
            working_on(record.name)
            first = max(record.size - most_bytes, 0)
            crcs.append(crc32(containers[record.container].read(record, first)))
        return crcs

    jobs, total = range(0, len(numbers), READ_AT_ONCE), len(numbers)
    verb = "compared the ends of" if most_bytes == END_BYTES else "compared"
    crcs = chain(*in_parallel(jobs, read, processes, verb, total))
    return np.fromiter(crcs, np.uint64, total)


def _as_marks(crcs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    marks: np.ndarray = crcs.astype(np.uint64) << np.uint64(32) | lengths
    return marks


def _repeated(marks: np.ndarray) -> np.ndarray:
    """Return which of these numbers are there more than once."""
    _, places, counts = np.unique(marks, return_inverse=True, return_counts=True)
    repeated: np.ndarray = (counts > 1)[places]
    return repeated
