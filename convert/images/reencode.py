"""Images that are encoded again, as JPEGs of high quality: turned upright, or of other formats."""

import io
import warnings
from functools import cache
from importlib import import_module

from convert.images.info import UNDECODABLE, reason
from convert.images.resize import in_mode
from convert.readers.records import READS_HEIC, Defect
from shards.image_limits import too_large

QUALITY = 95


def as_upright_jpeg(data: bytes) -> bytes:
    """Return an image as a JPEG, turned by its EXIF orientation; Defect if it is damaged."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(io.BytesIO(data), formats=_formats())
            if not all(image.size) or too_large(*image.size):
                raise Defect("too large", f"{image.width}x{image.height} pixels")
            if image.mode in ("F", "I"):
                raise Defect("undecodable", f"pixels of {image.mode} have no known range")
            turned = ImageOps.exif_transpose(image)
            stored = io.BytesIO()
            mode = "L" if turned.mode == "L" else "RGB"
            in_mode(turned, mode).save(stored, "JPEG", quality=QUALITY, subsampling="4:4:4")
    except Image.DecompressionBombError:
        raise Defect("too large", "more pixels than an image has") from None
    except UNDECODABLE as error:
        raise Defect("undecodable", reason(error)) from None
    return stored.getvalue()


@cache
def _formats() -> tuple[str, ...]:
    """Return the formats that are read, as Pillow names them."""
    if not READS_HEIC:
        return "JPEG", "TIFF", "AVIF"
    import_module("pillow_heif").register_heif_opener()
    return "JPEG", "TIFF", "AVIF", "HEIF"
