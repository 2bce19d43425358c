"""What converter and loader share about images: their limits, and the header of a JPEG.

The header is that of ITU-T T.81, annex B, as far as they need it.
"""

import re
import struct
from dataclasses import dataclass

FORMATS = {"JPEG": "jpg", "PNG": "png", "GIF": "gif", "BMP": "bmp", "WEBP": "webp"}
"""The formats that are read, as Pillow calls them, and the extension of each in a shard."""

MAX_PIXELS = 2**26  # the largest image of ImageNet has 61 million
MAX_SCANS = 100  # of a JPEG: its encoders make a dozen, and each may pass over the whole image
MAX_ASPECT = 100  # longer side to shorter: beyond it a resized strip would fill the memory

UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error)
"""What Pillow raises at damaged images; at the largest, also Image.DecompressionBombError."""

SCAN_MARKER = re.compile(rb"\xff\xda")  # three times as fast as bytes.count

START, END = b"\xff\xd8", b"\xff\xd9"  # markers of an image
PROGRESSIVE, SCAN = 0xC2, 0xDA
FRAMES = frozenset((0xC0, 0xC1, PROGRESSIVE))
OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}
SEGMENT = struct.Struct(">BBH")
ALONE = frozenset((*range(0xC0), *range(0xD0, 0xDA), 0xFF))  # markers without a length, and none


def too_large(width: int, height: int) -> bool:
    """Return True for an image beyond the limits, which neither converter nor loader reads."""
    return width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT * min(width, height)


def scans(jpeg: bytes) -> int:
    """Count the scans of a JPEG, those of its thumbnails included.

    The marker cannot occur within compressed pixels.
    """
    return len(SCAN_MARKER.findall(jpeg))


@dataclass(frozen=True, slots=True)
class Frame:
    """The frame header of a JPEG, and where its parts are in the file."""

    width: int
    height: int
    height_at: int
    one_scan: bool
    """True if the first scan is all that a decoder reads."""
    scan_at: int
    """First byte of the first scan's compressed pixels; of a progressive JPEG, which is decoded
    whole, the end of its frame header."""


def jpeg_frame(data: bytes) -> Frame | None:
    """Return the frame header of a gray or color JPEG of 8 bits; None for anything else.

    Decoders differ in which of two frame headers counts, so a file with two of them is none.
    """
    if data[:2] != START:
        return None
    at, frame_fields, components, one_scan, end = 2, None, 0, False, len(data) - 10
    while at <= end:
        mark, marker, length = SEGMENT.unpack_from(data, at)
        if mark != 0xFF or marker in ALONE:
            break
        if marker in OTHER_FRAMES or (marker in FRAMES and frame_fields):
            return None
        if marker in FRAMES:
            precision, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            if precision != 8 or components not in (1, 3) or not height or not width:
                return None
            frame_fields = width, height, at + 5
        if marker in (SCAN, PROGRESSIVE):
            one_scan = marker == SCAN and data[at + 4] == components
            break
        at += 2 + length
    return Frame(*frame_fields, one_scan, at + 2 + length) if frame_fields else None
