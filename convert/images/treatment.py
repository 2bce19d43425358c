"""From an image of a source to what a shard stores: checked, turned, resized, encoded once."""

import io
import warnings
import zlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from rackrun.convert.images.info import ImageInfo, inspect, reason
from rackrun.convert.readers.records import MAX_IMAGE_BYTES, Container, Defect, Record
from rackrun.shards.images import FORMATS, UNDECODABLE
from rackrun.shards.resize import FINE, Resize, in_mode

if TYPE_CHECKING:
    from PIL import Image

UPRIGHT_QUALITY = 95  # of JPEGs made of images that are turned, or in other formats
NO_RANGE = ("F", "I")  # modes whose pixels may have any value


@dataclass(frozen=True)
class StoredImage:
    """The bytes of an image as a shard has them."""

    data: bytes
    info: ImageInfo
    crc: int


@dataclass(frozen=True)
class Treatment:
    """The steps that all images of a data set go through; equal bytes become equal bytes."""

    preset: Resize
    upright: bool

    def stored(self, record: Record, container: Container) -> StoredImage:
        """Return what is stored of a record; raise Defect if the image cannot be used."""
        from rackrun.shards.pillow import foreign_formats

        if (size := max(record.size, record.length)) > MAX_IMAGE_BYTES:
            raise Defect("too large", f"{size:,} bytes")
        data = container.read(record)
        crc = zlib.crc32(data)
        # Wrong bytes among compressed pixels decode without an error: only this check sees them.
        if record.crc not in (None, crc):
            raise Defect("checksum")
        suffix = PurePosixPath(record.name).suffix
        source = inspect(data, suffix, foreign_formats(), self.preset.shrinks)
        stored, info = self.encoded(data, source)
        if stored is not data:
            crc = zlib.crc32(stored)
        return StoredImage(stored, info, crc)

    def encoded(self, data: bytes, source: ImageInfo) -> tuple[bytes, ImageInfo]:
        """Return the bytes to store and their facts; its own where nothing is to be changed."""
        from rackrun.shards.pillow import turned

        is_foreign = source.extension not in FORMATS.values()
        turns = source.orientation > 1 and (self.upright or is_foreign)
        sides = (source.width, source.height)
        size = sides[::-1] if turns and source.orientation > 4 else sides
        is_jpeg = source.extension == "jpg" and "cmyk" not in source.oddities
        resizes = not self.preset.keeps(size, is_jpeg)
        if not (resizes or turns or is_foreign):
            return data, source
        changed = "re-encoded" if is_foreign else "turned"
        try:
            with warnings.catch_warnings(action="ignore"):
                image = _decoded(data, FINE * min(self.preset.target(*size)) if resizes else 0)
                image = turned(image) if turns else image
                if resizes:
                    stored, size = self.preset.encoded(image), self.preset.target(*image.size)
                else:
                    image = in_mode(image, "L" if image.mode == "L" else "RGB")
                    stored, size = _fine_jpeg(image), image.size
        except UNDECODABLE as error:
            raise Defect("undecodable", reason(error)) from None
        oddities = [kind for kind in source.oddities if not (turns and kind == "rotated")]
        oddities += [changed] * (is_foreign or turns)
        return stored, ImageInfo("jpg", *size, tuple(oddities))


def _fine_jpeg(image: "Image.Image") -> bytes:
    stored = io.BytesIO()
    image.save(stored, "JPEG", quality=UPRIGHT_QUALITY, subsampling="4:4:4")
    return stored.getvalue()


def _decoded(data: bytes, side: int) -> "Image.Image":
    """Decode an image, a JPEG no finer than a shorter side of `side` pixels unless that is 0."""
    from PIL import Image

    from rackrun.shards.pillow import foreign_formats

    image: Image.Image = Image.open(io.BytesIO(data), formats=(*FORMATS, *foreign_formats()))
    if image.mode in NO_RANGE:
        raise Defect("undecodable", f"pixels of {image.mode} have no known range")
    if side:
        image.draft(None, (side, side))
    image.load()
    return image
