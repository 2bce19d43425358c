"""Restart tiles: baseline JPEGs that can be decoded in part.

The compressed pixels of a JPEG can only be read from their beginning, unless there are restart
markers. A tiled JPEG has one after every few MCUs. Such a run of MCUs is a tile; a whole number of
tiles fills a row of MCUs. A segment APP11 in front of the scan lists their lengths:

    FF EB, length, "rackrun tiles 1\\0", SHA-256 of the JPEG without tiles,
    and for each tile the bytes to the end of the marker after it (2 bytes, little-endian)

Any decoder can read such a file. The loader cuts out the tiles that a crop touches, and joins them
to a smaller JPEG. The list is not trusted: it must match the markers.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shards.images import END, TILES_MAGIC, Frame

TILE, NARROWEST = 32, 16  # pixels: about the width of a tile, and the least
CHROMA = 2  # pixels around a crop that chroma upsampling between MCUs needs
DIGEST_BYTES = 32
HEAD_BYTES = len(TILES_MAGIC) + DIGEST_BYTES
MOST_TILES = (0xFFFF - 2 - HEAD_BYTES) // 2  # for which a segment has room
LONGEST = 0xFFFF  # bytes of a tile, with the marker after it
FIRST_RESTART, RESTARTS = 0xD0, 8  # the numbers of restart markers repeat
SAMPLINGS = {  # factors of the components -> width and height of an MCU in pixels
    b"\x11\x11\x11": (8, 8),
    b"\x21\x11\x11": (16, 8),
    b"\x12\x11\x11": (8, 16),
    b"\x22\x11\x11": (16, 16),
}
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]


class Grid(NamedTuple):
    """The tiles of an image: their number, and their size in pixels."""

    columns: int
    rows: int
    tile_width: int
    tile_height: int


@dataclass(frozen=True, slots=True)
class TileCut:
    """A part of a JPEG as a JPEG, and its position in the whole image, in pixels."""

    data: bytearray
    left: int
    top: int
    width: int
    height: int


def mcu_size(data: bytes, frame: Frame) -> tuple[int, int] | None:
    """Return width and height of an MCU in pixels; None for a rare chroma subsampling."""
    count = data[frame.height_at + 4]
    if count == 1:
        return 8, 8
    first = frame.height_at + 6
    return SAMPLINGS.get(data[first : first + 3 * count : 3])


def tile_interval(width: int, height: int, mcu: tuple[int, int]) -> int:
    """Return the number of MCUs in a tile about TILE pixels wide whose list fits the segment.

    A divisor of the MCUs in a row: if that is a prime number, a tile is one MCU or all. Tiles of 8
    pixels would make a file too long.
    """
    across, down = -(-width // mcu[0]), -(-height // mcu[1])
    possible = [
        number
        for number in range(1, across + 1)
        if not across % number
        and across // number * down <= MOST_TILES
        and (number * mcu[0] >= NARROWEST or number == across)
    ]
    return min(possible, key=lambda mcus: abs(math.log(mcus * mcu[0] / TILE)))


def grid_of(data: bytes, frame: Frame) -> Grid | None:
    """Return the tiles by the frame of a JPEG and its restart interval; None if there are none."""
    size, interval = mcu_size(data, frame), frame.restart_interval
    if not (size and interval and frame.one_scan):
        return None
    across = -(-frame.width // size[0])
    if across % interval:
        return None
    return Grid(across // interval, -(-frame.height // size[1]), interval * size[0], size[1])


def tile_bounds(data: bytes, frame: Frame, grid: Grid) -> Numbers | None:
    """Return where each tile begins and the last one's marker ends.

    None unless the list fits the markers.
    """
    import numpy as np

    at, count = frame.tiles_at, grid.columns * grid.rows
    if not at or (data[at + 2] << 8 | data[at + 3]) != 2 + HEAD_BYTES + 2 * count:
        return None
    bounds = np.empty(count + 1, np.int64)
    bounds[0], bounds[1:] = frame.scan_at, np.frombuffer(data, "<u2", count, at + 4 + HEAD_BYTES)
    bounds = bounds.cumsum()
    if bounds[-1] != len(data):
        return None
    content, last = np.frombuffer(data, np.uint8), bounds[1:] - 1
    sound = content.take(last).tobytes() == _numbers(count)
    return bounds if sound and content.take(last - 1).tobytes() == b"\xff" * count else None


@lru_cache(256)
def _numbers(count: int) -> bytes:
    """Return the second bytes of the markers after `count` tiles: restart markers, then the end."""
    return bytes(FIRST_RESTART + number % RESTARTS for number in range(count - 1)) + END[1:]


def window(
    data: bytes, frame: Frame, left: int, top: int, right: int, bottom: int, margin: int = CHROMA
) -> TileCut | None:
    """Return the tiles that contain a box and `margin` pixels around it, as a JPEG.

    Its height ends with the box; `bottom` includes the margin. None if that would be no smaller
    than the image cut off below the box, or if the image has no tiles that match their list.
    """
    if not frame.tiles_at or (grid := grid_of(data, frame)) is None:
        return None
    first = max(0, left - margin) // grid.tile_width
    upper = max(0, top - margin) // grid.tile_height
    last = min(grid.columns, -(-(right + margin) // grid.tile_width))
    lower = min(grid.rows, -(-bottom // grid.tile_height))
    if not upper and last - first == grid.columns:
        return None
    bounds = tile_bounds(data, frame, grid)
    if bounds is None:
        return None
    starts = bounds[:-1].reshape(grid.rows, grid.columns)[upper:lower, first:last]
    stops = bounds[1:].reshape(grid.rows, grid.columns)[upper:lower, first:last]
    x, y = first * grid.tile_width, upper * grid.tile_height
    width = min((last - first) * grid.tile_width, frame.width - x)
    height = min(bottom, frame.height) - y
    return TileCut(_joined(data, frame, starts, stops, width, height), x, y, width, height)


def _joined(
    data: bytes, frame: Frame, starts: Numbers, stops: Numbers, width: int, height: int
) -> bytearray:
    import numpy as np

    view = memoryview(data)
    rows = zip(starts[:, 0].tolist(), stops[:, -1].tolist(), strict=True)
    joined = bytearray().join([view[: frame.scan_at], *[view[low:high] for low, high in rows]])
    struct.pack_into(">HH", joined, frame.height_at, height, width)
    marks = (stops - starts).ravel().cumsum() + (frame.scan_at - 1)
    np.frombuffer(joined, np.uint8)[marks] = np.frombuffer(_numbers(len(marks)), np.uint8)
    return joined


def original_digest(data: bytes, frame: Frame) -> bytes:
    """Return the SHA-256 of the JPEG that a tiled one was made of."""
    at = frame.tiles_at + 4 + len(TILES_MAGIC)
    return data[at : at + DIGEST_BYTES]
