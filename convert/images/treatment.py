"""From an image of a source to what a shard stores: checked, turned upright, resized."""

import io
import warnings
import zlib
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import PurePosixPath

from convert.images.info import ImageInfo, inspect, reason
from convert.images.resize import Preset, in_mode
from convert.readers.records import READS_HEIC, REENCODED_SUFFIXES, Container, Defect, Record
from shards.images import UNDECODABLE, too_large

UPRIGHT_QUALITY = 95  # of JPEGs made of images that are turned, or in other formats


@dataclass(frozen=True)
class StoredImage:
    """The bytes of an image as a shard has them."""

    data: bytes
    info: ImageInfo
    crc: int
    source: ImageInfo
    """The facts before it was resized."""


@dataclass(frozen=True)
class Treatment:
    """The steps that all images of a data set go through; equal bytes become equal bytes."""

    preset: Preset
    check: str
    upright: bool

    def stored(self, record: Record, container: Container) -> StoredImage:
        """Return what is stored of a record; raise Defect if the image cannot be used."""
        data = container.read(record)
        crc = zlib.crc32(data)
        # Wrong bytes among compressed pixels decode without an error: only this check sees them.
        if record.crc not in (None, crc):
            raise Defect("checksum")
        stored, source = self._inspected(data, PurePosixPath(record.name).suffix.lower())
        stored, info = self.preset.apply(stored, source)
        if stored is not data:
            crc = zlib.crc32(stored)
        return StoredImage(stored, info, crc, source)

    def _inspected(self, data: bytes, suffix: str) -> tuple[bytes, ImageInfo]:
        """Return an image and its facts; other formats, and what lies on its side, as a JPEG."""
        decode, oddity = self.check == "decode", "re-encoded"
        if suffix not in REENCODED_SUFFIXES:
            info = inspect(data, suffix, decode)
            if not self.upright or "rotated" not in info.oddities:
                return data, info
            oddity = "turned"
        upright = as_upright_jpeg(data)
        info = inspect(upright, ".jpg", decode)
        return upright, replace(info, oddities=(*info.oddities, oddity))


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
            in_mode(turned, mode).save(stored, "JPEG", quality=UPRIGHT_QUALITY, subsampling="4:4:4")
    except Image.DecompressionBombError:
        raise Defect("too large", "more pixels than an image has") from None
    except UNDECODABLE as error:
        raise Defect("undecodable", reason(error)) from None
    return stored.getvalue()


@cache
def _formats() -> tuple[str, ...]:
    if not READS_HEIC:
        return "JPEG", "TIFF", "AVIF"
    import_module("pillow_heif").register_heif_opener()
    return "JPEG", "TIFF", "AVIF", "HEIF"
