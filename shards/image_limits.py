"""Which pictures a shard may hold: converter and loader draw the same lines."""

import re

FORMATS = {"JPEG": "jpg", "PNG": "png", "GIF": "gif", "BMP": "bmp", "WEBP": "webp"}
"""The formats that are read, as Pillow calls them, and the extension of each in a shard."""

MAX_PIXELS = 2**26  # the largest picture of ImageNet has 61 million
MAX_SCANS = 100  # of a JPEG: its encoders make a dozen, and each may pass over all of the picture
MAX_ASPECT = 100  # longer side to shorter: beyond it a resized strip would fill the memory

SCAN = re.compile(rb"\xff\xda")  # three times as fast as bytes.count


def too_large(width: int, height: int) -> bool:
    """Whether nobody reads a picture of so many pixels."""
    return width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT * min(width, height)


def scans(jpeg: bytes) -> int:
    """How many scans a JPEG has, those of thumbnails in it included: in pixels none can begin."""
    return len(SCAN.findall(jpeg))
