"""Restart tiles (shards.tiles): a JPEG is rewritten once so that crops of it decode faster.

bytes -> restart markers, by libjpeg-turbo or by Pillow -> the list of tiles, in front -> bytes

Coefficients stay as they are, so every pixel does. Progressive JPEGs become baseline ones.
"""

import struct
from collections.abc import Iterator
from hashlib import sha256

from convert.images.transcoder import Refused, rewritten
from shards.images import END, SCAN, SEGMENT, START, TILES, TILES_MAGIC, Frame, jpeg_frame
from shards.tiles import FIRST_RESTART, LONGEST, grid_of, mcu_size, tile_bounds, tile_interval

FEWEST_PIXELS = 60_000  # of images that decode faster with tiles: 300 x 200 gain a tenth or less
USUAL_GROWTH = 1.1  # with the usual Huffman tables; beyond it, an image gets tables of its own
GROWTH = 1.25  # times its bytes that an image may have with tiles; progressive ones grow by 1.1
JFIF, COMMENT = 0xE0, 0xFE
MARKERS = END[1] + 1 - FIRST_RESTART  # from the first restart marker to the end of an image
REMARKS = {*range(JFIF, JFIF + 16), COMMENT}


class Untiled(Exception):
    """A JPEG that is stored as it is, although tiles would help; the text gives the reason."""


def gains_by_tiles(width: int, height: int) -> bool:
    """Return True if crops of an image of that size (pixels) decode faster with tiles."""
    return width * height >= FEWEST_PIXELS


def tiled(data: bytes) -> bytes:
    """Return a JPEG with tiles, any other image as it is.

    Untiled for a JPEG that cannot have tiles, or would grow too much.
    """
    frame = jpeg_frame(data)
    if frame is None:
        return data
    if frame.tiles_at:  # an image of another shard folder
        if not has_sound_tiles(data, frame):
            raise Untiled("its list of tiles does not fit it")
        return data
    size = mcu_size(data, frame)
    if size is None:
        raise Untiled("a rare sampling of its colours")
    interval = tile_interval(frame.width, frame.height, size)
    marked = data
    if frame.restart_interval != interval or not frame.one_scan:
        marked = _with_markers(data, frame, interval)
    tiled_data = _listed(marked, sha256(data).digest())
    if len(tiled_data) > GROWTH * len(data):
        raise Untiled(f"{len(tiled_data):,} bytes with tiles, {len(data):,} without")
    return tiled_data


def has_sound_tiles(data: bytes, frame: Frame) -> bool:
    """Return True if the list of a JPEG's tiles fits its markers."""
    grid = grid_of(data, frame)
    return grid is not None and tile_bounds(data, frame, grid) is not None


def same_coefficients(one: bytes, other: bytes) -> bool:
    """Return True if two JPEGs have the same coefficients and tables; Refused if one is damaged.

    Written anew by the same rules, without markers and remarks, such files are the same bytes.
    """
    return rewritten(one, optimised=True) == rewritten(other, optimised=True)


def _with_markers(data: bytes, frame: Frame, interval: int) -> bytes:
    """Return the JPEG as a baseline one with restart markers, and with all its remarks."""
    try:
        # Progressive files have tables of their own, and would grow too much without.
        marked = rewritten(data, interval, optimised=not frame.one_scan)
        if frame.one_scan and len(marked) > USUAL_GROWTH * len(data):
            marked = rewritten(data, interval, optimised=True)
    except Refused as error:
        raise Untiled(f"libjpeg-turbo: {error}") from None
    kinds = {_kind(segment) for segment in _remarks(marked)}
    remarks = [segment for segment in _remarks(data) if _kind(segment) not in kinds]
    at = _after_jfif(marked)
    return b"".join([marked[:at], *remarks, marked[at:]])


def _remarks(data: bytes) -> Iterator[bytes]:
    """Yield the segments of a JPEG that are for applications, and its comments."""
    at, marker = len(START), 0
    while marker != SCAN:
        _, marker, length = SEGMENT.unpack_from(data, at)
        if marker in REMARKS:
            yield data[at : at + 2 + length]
        at += 2 + length


def _kind(segment: bytes) -> bytes:
    # The marker and what the segment begins with, such as JFIF or Adobe.
    return segment[:2] + segment[4:9]


def _listed(marked: bytes, digest: bytes) -> bytes:
    import numpy as np

    frame = jpeg_frame(marked)
    grid = None if frame is None else grid_of(marked, frame)
    if frame is None or grid is None:
        raise Untiled("no baseline JPEG with restart markers")
    # No compressed pixels look like one of these markers; the last one ends the image.
    scan = np.frombuffer(marked, np.uint8)[frame.scan_at :]
    is_marker = (scan[:-1] == 0xFF) & (scan[1:] - np.uint8(FIRST_RESTART) < MARKERS)
    lengths = np.diff(np.flatnonzero(is_marker) + 2, prepend=0)
    if len(lengths) != grid.columns * grid.rows or marked[-2:] != END:
        raise Untiled("more or fewer restart markers than its size asks for")
    if lengths.max() > LONGEST:
        raise Untiled("a tile is too long")
    content = TILES_MAGIC + digest + lengths.astype("<u2").tobytes()
    segment = struct.pack(">BBH", 0xFF, TILES, 2 + len(content)) + content
    at = _after_jfif(marked)
    listed = marked[:at] + segment + marked[at:]
    frame = jpeg_frame(listed)
    if frame is None or tile_bounds(listed, frame, grid) is None:
        raise Untiled("restart markers in an unusual order")
    return listed


def _after_jfif(data: bytes) -> int:
    """Return the offset for a segment: after the JFIF header, which some readers want first."""
    at = len(START)
    return at + 2 + (data[at + 2] << 8 | data[at + 3]) if data[at + 1] == JFIF else at
