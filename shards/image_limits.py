"""Limits on the images of a shard, the same for converter and loader."""

import re
import struct

FORMATS = {"JPEG": "jpg", "PNG": "png", "GIF": "gif", "BMP": "bmp", "WEBP": "webp"}
"""The formats that are read, as Pillow calls them, and the extension of each in a shard."""

MAX_PIXELS = 2**26  # the largest image of ImageNet has 61 million
MAX_SCANS = 100  # of a JPEG: its encoders make a dozen, and each may pass over the whole image
MAX_ASPECT = 100  # longer side to shorter: beyond it a resized strip would fill the memory

UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error)
"""What Pillow raises at damaged images; at the largest, also Image.DecompressionBombError."""

SCAN = re.compile(rb"\xff\xda")  # three times as fast as bytes.count


def too_large(width: int, height: int) -> bool:
    """Return True for an image beyond the limits, which neither converter nor loader reads."""
    return width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT * min(width, height)


def scans(jpeg: bytes) -> int:
    """Count the scans of a JPEG, those of its thumbnails included.

    The marker cannot occur within compressed pixels.
    """
    return len(SCAN.findall(jpeg))
