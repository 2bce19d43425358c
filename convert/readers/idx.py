"""IDX files, the form in which MNIST is published: a pair of images and labels, plain or gzipped.

    magic 2051, count, rows, columns, then a byte per pixel     (all numbers 32 bits, big-endian)
    magic 2049, count, then a byte per label

A pair is small enough to keep in memory; each image becomes a PNG when its turn comes.
"""

import gzip
import io
import os
import struct
import zlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, cast

from convert.readers.records import Record, as_text, open_archive, reading
from rackrun.errors import DataError
from shards.index import Origin

IMAGES, LABELS = 2051, 2049
IMAGE_HEAD, LABEL_HEAD = struct.Struct(">4L"), struct.Struct(">2L")
GZIP = b"\x1f\x8b"
LARGEST = 1 << 30  # bytes: MNIST has 47 million
ANEW = "download it again"


class IdxPair:
    """A file of images and the file of their labels."""

    def __init__(self, images: Path, labels: Path, sides: tuple[int, int], classes: int) -> None:
        """Read both files; DataError unless all images have `sides`, all labels a class."""
        self._images, self._sides = images, sides
        self._pixels = _content(images, IMAGE_HEAD, IMAGES)
        self._labels = _content(labels, LABEL_HEAD, LABELS)
        _, count, rows, columns = IMAGE_HEAD.unpack_from(self._pixels)
        if (rows, columns) != sides:
            raise DataError(f"{images}: images of {rows}x{columns}, not {sides[0]}x{sides[1]}")
        _, labelled = LABEL_HEAD.unpack_from(self._labels)
        if count != labelled:
            raise DataError(f"{labels}: {labelled:,} labels for {count:,} images; {ANEW}")
        _check_length(images, self._pixels, IMAGE_HEAD.size + count * rows * columns)
        _check_length(labels, self._labels, LABEL_HEAD.size + count)
        for number, label in enumerate(self._labels[LABEL_HEAD.size :]):
            if label >= classes:
                raise DataError(f"{labels}: label {number:,} is {label}, not 0 to {classes - 1}")
        self.count = count

    def records(self, prefix: str, split: str, container: int) -> Iterator[Record]:
        """Yield a record per image; keys are the prefix and its number."""
        size = self._sides[0] * self._sides[1]
        for number, label in enumerate(self._labels[LABEL_HEAD.size :]):
            key, offset = f"{prefix}_{number:05d}", IMAGE_HEAD.size + number * size
            name = as_text(f"{self._images.name}/{number}.png")
            yield Record(key, label, split, name, container, offset, size, size)

    def origin(self) -> Origin:
        """Return the entry of the manifest: of both files together."""
        digest = sha256(self._pixels + self._labels).hexdigest()
        size = len(self._pixels) + len(self._labels)
        return Origin(as_text(self._images.name), size, digest)

    def read(self, record: Record) -> bytes:
        """Return the image of a record as a PNG."""
        from PIL import Image

        pixels = self._pixels[record.offset : record.offset + record.length]
        stored = io.BytesIO()
        Image.frombytes("L", self._sides[::-1], pixels).save(stored, "PNG")
        return stored.getvalue()


def _content(path: Path, head: struct.Struct, magic: int) -> bytes:
    """Return a file, unpacked if it is gzipped; DataError if it is not of that kind."""
    with reading(path), os.fdopen(open_archive(path), "rb") as file:
        is_packed = file.peek(2).startswith(GZIP)
        try:
            packed = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_packed else file
            data = packed.read(LARGEST + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path}: damaged: {error}; {ANEW}") from None
    if len(data) > LARGEST:
        raise DataError(f"{path}: over {LARGEST:,} bytes: not a file of MNIST")
    actual_magic = int.from_bytes(data[:4], "big")
    if len(data) < head.size or actual_magic != magic:
        raise DataError(
            f"{path}: begins with {actual_magic}, an IDX file of this kind with {magic}"
        )
    return data


def _check_length(path: Path, data: bytes, expected: int) -> None:
    if len(data) != expected:
        raise DataError(f"{path}: {len(data):,} bytes, its header promises {expected:,}; {ANEW}")
