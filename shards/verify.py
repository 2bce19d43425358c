"""Verify samples and whole shards by the index and the manifest."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rackrun.errors import DataError
from shards.index import Row, Shard
from shards.source import Source, Stored
from shards.writer import BLOCK

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Sample:
    """One image as stored in its shard."""

    key: str
    image: bytes
    extension: str
    label: int
    fault: DataError | None = None
    """Why the sample cannot be used; the image is then empty."""


def checked_rows(rows: np.ndarray, data: Stored, where: str, adopted: bool) -> list[Sample]:
    """Return the samples of adjacent rows; a damaged one has a fault."""
    start = int(rows[0]["offset"])
    return [_sample_or_fault(row, data, start, where, adopted) for row in rows]


def _sample_or_fault(row: Any, data: Stored, base: int, where: str, adopted: bool) -> Sample:
    try:
        return sample_at(row, data, base, where, adopted)
    except DataError as error:
        return as_fault(row, error)


def as_fault(row: Any, error: DataError) -> Sample:
    """Return a sample with an error and without an image."""
    return Sample(f"the sample at byte {row['offset']}", b"", "", int(row["label"]), error)


def sample_of(source: Source, shard: Shard, row: Any, data: Stored) -> Sample:
    """Return the sample of an index row; wrong bytes are read once more, then DataError."""
    where, start = f"{source.location}: {shard.name}", int(row["offset"])
    adopted = source.manifest.adopted
    try:
        return sample_at(row, data, start, where, adopted)
    except DataError:
        again = source.reread(shard, start, int(row["length"]))
        return sample_at(row, again, start, where, adopted)


def sample_at(row: Any, data: Stored, base: int, where: str, adopted: bool = False) -> Sample:
    """Return the sample of an index row from `data`, which begins at byte `base` of its tar.

    DataError unless both members match the index: key, label and image. For an adopted tar, only
    the index has the label, and its digest is in the manifest.
    """
    expected = Row(*row.item())
    view = memoryview(data)
    start, image_start = expected.offset - base, expected.image_offset - base
    image = bytes(view[image_start : image_start + expected.image_length])
    if zlib.crc32(image) != expected.crc:
        named_at = image_start - BLOCK if adopted else start
        name = _name(bytes(view[named_at : named_at + BLOCK]), adopted)
        raise DataError(f"{where}: the image at byte {expected.image_offset} is damaged{name}")
    header = bytes(view[image_start - BLOCK : image_start])
    if adopted:
        key = key_in(header, where, expected.image_offset - BLOCK)
        return Sample(key, image, expected.format.decode("ascii", "replace"), expected.label)
    label_member = bytes(view[start : start + 2 * BLOCK])
    key, kind = _member(label_member[:BLOCK], where, expected.offset)
    digits = label_member[BLOCK:].rstrip(b"\0")
    named, extension = _member(header, where, expected.image_offset - BLOCK)
    if kind != "cls" or named != key or digits != b"%d" % expected.label:
        raise DataError(f"{where}: sample {key} at byte {expected.offset} differs from its index")
    return Sample(key, image, extension, expected.label)


def verified(blocks: Iterator[Stored], shard: Shard, where: str) -> Iterator[Stored]:
    """Yield the blocks of a shard; DataError at the end if length or digest are wrong."""
    digest, size = hashlib.sha256(), 0
    for block in blocks:
        digest.update(block)
        size += len(block)
        yield block
    if size > shard.bytes:
        raise DataError(f"{where}: longer than the {shard.bytes} bytes in the manifest")
    if size != shard.bytes:
        raise DataError(f"{where}: {size} bytes long, not the {shard.bytes} in the manifest")
    if digest.hexdigest() != shard.sha256:
        raise DataError(f"{where}: damaged: its SHA-256 is not the one in the manifest")


def _member(header: bytes, where: str, offset: int) -> tuple[str, str]:
    """Return stem and extension of the member whose tar header this is."""
    name, dot, extension = _member_name(header, where, offset).partition(".")
    if not dot:
        raise DataError(f"{where}: byte {offset}: not the header of a sample's member")
    return name, extension


def _member_name(header: bytes, where: str, offset: int) -> str:
    """Return the name in a tar header; of a name over 100 bytes, the beginning."""
    # A header's checksum is the sum of its bytes, with blanks in the checksum's own field. Adler-32
    # has the sum in its lower half, plus one, and takes a hundredth of the time of `sum`.
    stored = header[148:156]
    checksum = (zlib.adler32(header) & 0xFFFF) - 1 - sum(stored) + len(stored) * ord(" ")
    if stored[:6] != b"%06o" % checksum:
        raise DataError(f"{where}: byte {offset}: not the header of a sample's member")
    return header[:100].rstrip(b"\0").decode("ascii", "replace")


def _name(header: bytes, adopted: bool) -> str:
    """Return a sample's name for a message, if its header is intact."""
    try:
        return f" (sample {key_in(header, '', 0) if adopted else _member(header, '', 0)[0]})"
    except DataError:
        return ""


def key_in(header: bytes, where: str, offset: int) -> str:
    """Return the key in the header of a member: its name up to the first dot after the folders.

    DataError, which names the place, if it is not a header.
    """
    folder, slash, file = _member_name(header, where, offset).rpartition("/")
    return folder + slash + file.partition(".")[0]
