"""Prepare files to predict as the conversion prepared the training images.

file of a camera -> PNG -> as the conversion stores it -> ... the model's square, upright
"""

import io
import warnings

import numpy as np
from PIL import Image, UnidentifiedImageError

from rackrun.errors import DataError
from rackrun.shards import pillow
from rackrun.shards.images import FORMATS
from rackrun.shards.pillow import foreign_formats, turned
from rackrun.shards.resize import FINE, Resize, in_mode
from rackrun.training.data.decode import PILLOW_ERRORS, Pixels, check_size
from rackrun.training.data.transforms import Transforms

CAMERA_MARKS = (b"II*\0", b"MM\0*", *(b"P%d" % kind for kind in range(1, 7)))  # of TIFF and PPM
CAMERA_BOX = b"ftyp"  # from byte 4 on: AVIF and HEIC


def for_prediction(transforms: Transforms, data: bytes) -> Pixels:
    """Return what evaluation would see of a file: uint8 (side, side, channels); DataError for none.

    It is changed as the conversion of the training data changed theirs.
    """
    image = as_png(data) if is_of_camera(data) else data
    square = transforms.for_evaluation(as_stored(image, transforms.conversion))
    return upright(square, image) if transforms.upright else square


def is_of_camera(data: bytes) -> bool:
    """Return whether a file is a TIFF, AVIF, HEIC or PPM, which a conversion makes a JPEG of."""
    return data.startswith(CAMERA_MARKS) or data[4:8] == CAMERA_BOX


def as_stored(data: bytes, conversion: Resize) -> bytes:
    """Return the bytes that a conversion would have stored of an image; DataError for none."""
    if conversion.passes_through:
        return data
    try:
        image = Image.open(io.BytesIO(data), formats=tuple(FORMATS))
        check_size(*image.size)
        if conversion.keeps(image.size, image.format == "JPEG" and image.mode != "CMYK"):
            return data
        side = FINE * min(conversion.target(*image.size))
        image.draft(None, (side, side))
        return conversion.encoded(image)
    except UnidentifiedImageError as error:
        raise DataError(f"not an image ({', '.join(FORMATS)})") from error
    except PILLOW_ERRORS as error:
        raise DataError(f"not a whole image: {error}") from error


def as_png(data: bytes) -> bytes:
    """Return a TIFF, AVIF, HEIC or PPM as an upright PNG; DataError where that cannot be done."""
    try:
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(io.BytesIO(data), formats=foreign_formats())
            check_size(*image.size)
            if image.mode in ("F", "I"):
                raise ValueError(f"pixels of {image.mode} have no known range")
            upright_image = in_mode(turned(image), "RGB")
    except UnidentifiedImageError as error:
        needs = "" if "HEIF" in foreign_formats() else "; for HEIC type pip install pillow-heif"
        raise DataError(f"not a TIFF, AVIF or HEIC image that can be read here{needs}") from error
    except PILLOW_ERRORS as error:
        raise DataError(f"not a whole image: {error}") from error
    stored = io.BytesIO()
    upright_image.save(stored, "PNG", compress_level=0)
    return stored.getvalue()


def orientation(data: bytes) -> int:
    """Return the orientation of an image file; 1, upright, if it names none."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return pillow.orientation(Image.open(io.BytesIO(data), formats=tuple(FORMATS)))
    except PILLOW_ERRORS:
        return 1


def upright(square: Pixels, data: bytes) -> Pixels:
    """Return the center of an image, uint8 (side, side, channels), turned as its file says."""
    turn = orientation(data)
    if turn == 1:
        return square
    turned = square.transpose(1, 0, 2) if turn > 4 else square
    across = -1 if turn in (2, 3, 6, 7) else 1
    down = -1 if turn in (3, 4, 7, 8) else 1
    return np.ascontiguousarray(turned[::down, ::across])
