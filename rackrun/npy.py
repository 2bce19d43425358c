"""Arrays as numpy stores them (`.npy`, format 1.0), read without trusting their header.

numpy evaluates a header as a Python literal and allocates as many numbers as it names. Here it must
be text of one form, with a type from a list, and the numbers must be there.
"""

import math
import re
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmap import mmap

    import numpy as np

MAGIC = b"\x93NUMPY\x01\x00"
PREFIX = len(MAGIC) + 2
LONGEST_HEADER = 256  # of an array of one plain type
HEADER = re.compile(
    rb"\{'descr': (?P<descr>[^{}]{1,999}), 'fortran_order': False,"
    rb" 'shape': \((?P<shape>[0-9, ]{0,80})\)(?:, )?\} *\n"
)
NUMBER = re.compile(rb"\d{1,15}")


def header(descr: Any, shape: tuple[int, ...]) -> bytes:
    """Return the bytes that precede the numbers of an array of this type and shape."""
    text = repr({"descr": descr, "fortran_order": False, "shape": shape})
    # Padded, so that the numbers begin at a multiple of 64 bytes.
    text += " " * (-(PREFIX + len(text) + 1) % 64) + "\n"
    return MAGIC + struct.pack("<H", len(text)) + text.encode()


def array(data: "bytes | mmap", *descrs: Any) -> "np.ndarray":
    """Return the array in a file's bytes, of one of these types; ValueError for anything else."""
    import numpy as np

    start = PREFIX + int.from_bytes(data[len(MAGIC) : PREFIX], "little")
    match = HEADER.fullmatch(data, PREFIX, start) if data[: len(MAGIC)] == MAGIC else None
    types = {repr(descr).encode(): descr for descr in descrs}
    if not match or match["descr"] not in types:
        raise ValueError("not the header of such an array")
    shape = tuple(int(number) for number in NUMBER.findall(match["shape"]))
    dtype = np.dtype(types[match["descr"]])
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise ValueError(f"{len(data) - start} bytes for the shape {shape}")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)
