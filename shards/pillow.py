"""Pillow as converter, training and prediction use it: its limits, and which way up an image is."""

import warnings
from functools import cache
from importlib import import_module, util

import numpy as np
from PIL import Image, PngImagePlugin

from rackrun.shards.images import MAX_PIXELS, UNDECODABLE

MAX_TEXT_BYTES = 64 << 20  # unpacked: an editor's history, a color profile
FEW_LEVELS = 64
"""At most so many are left of an image of 16 bits that uses 14 of them: it is dark, and coarse."""
LARGEST_SHRUNK = 4 * MAX_PIXELS  # pixels of a JPEG that is decoded at an eighth, as of a telephone

# Pillow's own limits of text are 1 MB, and a whole image with more is none to it.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = MAX_TEXT_BYTES
Image.MAX_IMAGE_PIXELS = LARGEST_SHRUNK

ORIENTATION = 0x0112  # the tag of EXIF
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def orientation(image: Image.Image) -> int:
    """Return the orientation that EXIF or XMP names; 1, upright, if neither does or is malformed.

    Of a PNG, whose EXIF may follow the pixels, all is read.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            value = image.getexif().get(ORIENTATION)
    except UNDECODABLE:
        return 1
    return value if isinstance(value, int) and value in TURNS else 1


def turned(image: Image.Image) -> Image.Image:
    """Return the image upright."""
    image.load()  # first: a TIFF is turned by Pillow itself
    turn = TURNS.get(orientation(image))
    return image if turn is None else image.transpose(turn)


def levels_left(image: Image.Image) -> int:
    """Return how many levels a decoded image of 16 bits has in the upper 8, which count.

    An image of 12 bits has at most 16; 256 are there if all bits are used.
    """
    if image.mode.startswith("I;16"):
        return int(np.asarray(image).max() >> 8) + 1
    return int(np.asarray(image.convert("RGB")).max()) + 1


@cache
def foreign_formats() -> tuple[str, ...]:
    """Return the formats, as Pillow calls them, that a shard has none of and that are read here.

    HEIC is among them where pillow-heif is installed.
    """
    if not util.find_spec("pillow_heif"):
        return "TIFF", "AVIF", "PPM"
    import_module("pillow_heif").register_heif_opener()
    return "TIFF", "AVIF", "PPM", "HEIF"
