"""Tables of structs out of MATLAB's MAT-files of level 5: what the devkit of ImageNet comes in.

Only what is asked for is built, numbers and words, and nothing nested is entered: a file that was
made to do harm costs no more than its own bytes. "MAT-File Format", MathWorks, chapter 1.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from itertools import islice

HEADER_BYTES = 128
ORDERS = {b"IM": "<", b"MI": ">"}  # the last two bytes of the header
MATRIX, COMPRESSED = 14, 15
STRUCT, CHAR = 2, 4  # classes of a matrix
NUMBERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}
TEXTS = {1: "utf-8", 2: "utf-8", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
ENDIANS = {"<": "-le", ">": "-be"}

Value = int | float | str | None
"""A number, the first of several; text; or None for anything else."""


class NotMatlab(ValueError):
    """Bytes that are no MAT-file of level 5, or hold no such table."""


def structs(data: bytes, name: str, most_bytes: int) -> list[dict[str, Value]]:
    """Return the structs of that name; NotMatlab if there are none, or they unpack to more."""
    order = ORDERS.get(data[HEADER_BYTES - 2 : HEADER_BYTES])
    if order is None:
        raise NotMatlab("no MAT-file of level 5")
    reader = _Reader(order, most_bytes)
    try:
        for kind, content in reader.elements(memoryview(data)[HEADER_BYTES:]):
            if kind == COMPRESSED:
                ((kind, content),) = islice(reader.elements(reader.inflated(content)), 1)
            if kind == MATRIX and reader.head(content)[0] == (STRUCT, name):
                return list(reader.rows(content))
    except (struct.error, UnicodeError, zlib.error, ValueError, OverflowError) as error:
        raise NotMatlab(str(error)[:100]) from None
    raise NotMatlab(f"no table {name}")


class _Reader:
    def __init__(self, order: str, most_bytes: int) -> None:
        self._order = order
        self._left = most_bytes

    def elements(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield type and content of each data element."""
        at = 0
        while at < len(data):
            kind, length = struct.unpack_from(f"{self._order}II", data, at)
            start = at + 8
            if kind >> 16:  # a small one: type, length and content in eight bytes
                kind, length, start = kind & 0xFFFF, kind >> 16, at + 4
            if start + length > len(data):
                raise NotMatlab(f"cut off in its element at byte {at}")
            yield kind, data[start : start + length]
            at = start + length
            if kind != COMPRESSED:
                at += -at % 8

    def inflated(self, packed: memoryview) -> memoryview:
        """Return the content of a compressed element."""
        data = zlib.decompressobj().decompress(packed, self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise NotMatlab("unpacks to too many bytes")
        return memoryview(data)

    def head(self, matrix: memoryview) -> tuple[tuple[int, str], int]:
        """Return class and name of a matrix, and its number of items."""
        if not matrix:
            return (0, ""), 0
        (_, flags), (_, sizes), (_, name) = self._first(matrix, 3)
        return (self._uint32(flags) & 0xFF, bytes(name).decode()), math.prod(
            value[0] for value in struct.iter_unpack(f"{self._order}i", sizes)
        )

    def rows(self, matrix: memoryview) -> Iterator[dict[str, Value]]:
        """Yield the structs of a matrix of them."""
        elements = self.elements(matrix)
        count = self.head(matrix)[1]
        width, names = [content for _, content in islice(elements, 5)][3:]
        size = max(1, self._uint32(width))
        fields = [
            bytes(names[at : at + size]).split(b"\0")[0].decode()
            for at in range(0, len(names), size)
        ]
        for _ in range(count if fields else 0):
            values = list(islice(elements, len(fields)))
            if len(values) < len(fields):
                raise NotMatlab("cut off in its table")
            yield {
                field: self._value(content)
                for field, (_, content) in zip(fields, values, strict=True)
            }

    def _value(self, matrix: memoryview) -> Value:
        (kind, _), count = self.head(matrix)
        if kind <= STRUCT or not count:
            return "" if kind == CHAR else None
        *_, (stored, content) = self._first(matrix, 4)
        if kind == CHAR:
            coding = TEXTS.get(stored, "utf-8")
            order = "" if coding == "utf-8" else ENDIANS[self._order]
            return bytes(content).decode(coding + order)
        number: int | float = struct.unpack_from(self._order + NUMBERS.get(stored, "b"), content)[0]
        return number

    def _first(self, matrix: memoryview, count: int) -> list[tuple[int, memoryview]]:
        elements = list(islice(self.elements(matrix), count))
        if len(elements) < count:
            raise NotMatlab("cut off in a matrix")
        return elements

    def _uint32(self, data: memoryview) -> int:
        return int(struct.unpack_from(f"{self._order}I", data)[0])
