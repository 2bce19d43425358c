"""Samples of a source: a whole shard, or some of its rows; each verified."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rackrun.errors import DataError, Unavailable
from rackrun.shards.index import Shard
from rackrun.shards.source import Range, Source, Stored
from rackrun.shards.writer import BLOCK

if TYPE_CHECKING:
    import numpy as np

NAME_BYTES = 100  # of a header


@dataclass(frozen=True)
class Sample:
    """One image as stored in its shard."""

    key: str
    image: bytes
    extension: str
    """The format of the image: jpg, png, gif, bmp or webp, whatever its member is called."""
    label: int
    fault: DataError | None = None
    """Why the sample cannot be used; the image is then empty."""


def samples(source: Source, split: str, number: int) -> Iterator[Sample]:
    """Yield every sample of one shard in order, each verified, and at the end the whole shard."""
    shard = source.manifest.split(split).shards[number]
    for row, data in stored_samples(source, split, number):
        yield sample_of(source, shard, row, data)


def sample_in_row(source: Source, split: str, number: int) -> Sample:
    """Return the sample of a row of a split's index; DataError if it is damaged."""
    row = source.index(split)[number]
    shard = source.manifest.split(split).shards[int(row["shard"])]
    data = source.read(shard, int(row["offset"]), int(row["length"]))
    return sample_of(source, shard, row, data)


def portions(
    source: Source, requests: Iterable[tuple[Shard, np.ndarray]]
) -> Iterator[list[Sample]]:
    """Yield samples portion by portion, while the next portions are being fetched.

    A portion is consecutive rows of the index of a shard; each sample is verified by its row. A
    damaged or missing sample has a fault; Unavailable is raised.
    """
    waiting = deque(requests)
    while waiting:  # after a portion that cannot be read, begin anew with the one after it
        reads = source.reads([_range_of(*portion) for portion in waiting])
        try:
            for data in reads:
                shard, rows = waiting.popleft()
                yield _samples_in(source, shard, rows, data)
        except Unavailable:
            raise
        except DataError as error:
            yield [_fault(row, error) for row in waiting.popleft()[1]]


def _range_of(shard: Shard, rows: np.ndarray) -> Range:
    start = int(rows[0]["offset"])
    return shard, start, int(rows[-1]["offset"] + rows[-1]["length"]) - start


def _samples_in(source: Source, shard: Shard, rows: np.ndarray, data: Stored) -> list[Sample]:
    view, portion = memoryview(data), list[Sample]()
    starts = (rows["offset"] - rows["offset"][0]).tolist()
    for row, start, length in zip(rows, starts, rows["length"].tolist(), strict=True):
        try:
            portion.append(sample_of(source, shard, row, view[start : start + length]))
        except Unavailable:
            raise
        except DataError as error:
            portion.append(_fault(row, error))
    return portion


def _fault(row: Any, error: DataError) -> Sample:
    return Sample(f"the sample at byte {row['offset']}", b"", "", int(row["label"]), error)


def stored_samples(source: Source, split: str, number: int) -> Iterator[tuple[Any, Stored]]:
    """Yield the rows of one shard, each with its bytes of the tar, for `sample_of` to check.

    At the end the whole shard is verified; if it is wrong it is read once more, as samples are.
    """
    shard = source.manifest.split(split).shards[number]
    rows = source.index(split)
    blocks, data, start = source.stream(shard), memoryview(b""), 0  # where `data` begins in the tar
    for row in rows[rows["shard"] == number]:
        offset, end = int(row["offset"]), int(row["offset"]) + int(row["length"])
        while start + len(data) < end:
            kept = data[max(offset - start, 0) :]  # without what no row names
            start += len(data) - len(kept)
            data = memoryview(b"".join((kept, next(blocks))))  # DataError where it is too short
        yield row, data[offset - start : end - start]
    try:
        deque(blocks, maxlen=0)  # the rest, so that length and digest are verified
    except Unavailable:
        raise
    except DataError:
        deque(source.stream(shard), maxlen=0)


def sample_of(source: Source, shard: Shard, row: Any, data: Stored) -> Sample:
    """Return the sample of an index row; wrong bytes are read once more, then DataError."""
    where = f"{source.location}: {shard.name}"
    try:
        return _sample(row, data, where)
    except DataError:
        data = source.reread(shard, int(row["offset"]), int(row["length"]))
        return _sample(row, data, where)


def _sample(row: Any, data: Stored, where: str) -> Sample:
    """Return the sample of an index row from its bytes of the tar.

    DataError unless the image is the one that the index means. The label is that of the index,
    whatever a .cls member says: its digest is in the manifest, and later versions change it there.
    """
    _, offset, _, image_offset, length, label, _, _, crc, form = row.item()
    view, image_start = memoryview(data), image_offset - offset
    image = bytes(view[image_start : image_start + length])
    header = bytes(view[image_start - BLOCK : image_start])
    if zlib.crc32(image) != crc:
        name = _shown_key(header)
        raise DataError(f"{where}: the image at byte {image_offset} is damaged{name}")
    key = key_in(header, where, image_offset - BLOCK)
    if b"\0" not in header[:NAME_BYTES]:  # its name is longer, and stands before
        key = _long_key(bytes(view[: image_start + BLOCK]), image_start) or key
    return Sample(key, image, form.decode("ascii", "replace"), label)


def _member_name(header: bytes, where: str, offset: int) -> str:
    """Return the name in a tar header; of a name over 100 bytes, the beginning."""
    # A header's checksum is the sum of its bytes, with blanks in the checksum's own field. Adler-32
    # has the sum in its lower half, plus one, and takes a hundredth of the time of `sum`.
    stored = header[148:156]
    checksum = (zlib.adler32(header) & 0xFFFF) - 1 - sum(stored) + len(stored) * ord(" ")
    if stored[:6] != b"%06o" % checksum:
        raise DataError(f"{where}: byte {offset}: not the header of a sample's member")
    return header[:NAME_BYTES].rstrip(b"\0").decode("ascii", "replace")


def _shown_key(header: bytes) -> str:
    try:
        return f" (sample {key_in(header, '', 0)})"
    except DataError:
        return ""


def key_in(header: bytes, where: str, offset: int) -> str:
    """Return the key in the header of a member: its name up to the first dot after the folders.

    DataError, which names the place, if it is not a header.
    """
    return key_of(_member_name(header, where, offset))


def key_of(name: str) -> str:
    """Return the key in the name of a member: up to the first dot after the folders."""
    return key_and_suffix(name)[0]


def key_and_suffix(name: str) -> tuple[str, str]:
    """Return the key in the name of a member, and what follows it."""
    folder, slash, file = name.rpartition("/")
    stem, dot, suffix = file.partition(".")
    return folder + slash + stem, dot + suffix


def is_meta(file: str) -> bool:
    """Return True for a file of a tar that describes it and is no sample, such as __info__.json."""
    stem = file.partition(".")[0]
    return stem.startswith("__") and stem.endswith("__")


def _long_key(members: bytes, image_at: int) -> str:
    """Return the key of the member whose content begins there; "" where no header has it."""
    odd = (tarfile.TarError, ValueError, OverflowError, RecursionError)
    with suppress(*odd), tarfile.open(fileobj=io.BytesIO(members), mode="r:") as tar:
        return next((key_of(each.name) for each in tar if each.offset_data == image_at), "")
    return ""
