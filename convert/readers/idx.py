"""IDX files, in which MNIST is published, gzipped or not.

magic 2051, count, rows, columns, then a byte per pixel     (all numbers 32 bits, big-endian)
magic 2049, count, then a byte per label
"""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from rackrun.convert.readers.records import open_archive, reading
from rackrun.errors import DataError

OF_BYTES = 0x800  # magic of a file of bytes, without its number of dimensions
GZIP = b"\x1f\x8b"
LARGEST = 1 << 30  # bytes: MNIST has 47 million
SIDES = (28, 28)
ANEW = "download it again"


def idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the bytes of an IDX file by its dimensions; DataError for any other file."""
    with reading(path), os.fdopen(open_archive(path), "rb") as file:
        is_packed = file.peek(2).startswith(GZIP)
        try:
            packed = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_packed else file
            data = packed.read(LARGEST + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path}: damaged: {error}; {ANEW}") from None
    if len(data) > LARGEST:
        raise DataError(f"{path}: over {LARGEST:,} bytes: not a file of MNIST")
    head, magic = struct.Struct(f">{1 + dimensions}L"), OF_BYTES + dimensions
    found = int.from_bytes(data[:4], "big")
    if len(data) < head.size or found != magic:
        raise DataError(f"{path}: begins with {found}, an IDX file of this kind with {magic}")
    sizes = head.unpack_from(data)[1:]
    if sizes[1:] not in ((), SIDES):
        raise DataError(f"{path}: images of {sizes[1]}x{sizes[2]}, not {SIDES[0]}x{SIDES[1]}")
    promised = head.size + math.prod(sizes)
    if len(data) != promised:
        raise DataError(f"{path}: {len(data):,} bytes, its header promises {promised:,}; {ANEW}")
    return np.frombuffer(data, np.uint8, offset=head.size).reshape(sizes)
