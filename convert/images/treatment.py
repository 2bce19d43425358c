"""From an image of a source to what a shard stores: checked, turned, resized, encoded once."""

import io
import warnings
import zlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from rackrun.convert.images.info import ImageInfo, inspect, reason
from rackrun.convert.readers.records import Container, Defect, Record
from rackrun.errors import DataError, UsageError
from rackrun.shapes import Misshapen, shaped
from rackrun.shards.images import FORMATS, UNDECODABLE
from rackrun.shards.index import Manifest
from rackrun.shards.resize import FINE, Resize, in_mode

if TYPE_CHECKING:
    from PIL import Image

UPRIGHT_QUALITY = 95  # of JPEGs made of images that are turned, or in other formats
NO_RANGE = ("F", "I")  # modes whose pixels may have any value


@dataclass(frozen=True)
class Preset(Resize):
    """Size and quality of the stored images; images are not changed by default."""

    def __post_init__(self) -> None:
        if self.size is not None and self.short_side is not None:
            raise UsageError("--size and --short-side exclude each other")
        for name, side in (("--size", self.size), ("--short-side", self.short_side)):
            if side is not None and not 1 <= side <= 4096:
                raise UsageError(f"{name} {side}: 1 to 4096 pixels are possible")
        if self.quality is not None and not 1 <= self.quality <= 95:
            raise UsageError(f"--quality {self.quality}: 1 to 95 is possible")

    @classmethod
    def of(cls, manifest: Manifest) -> "Preset":
        """Return the preset of a shard folder; DataError for one that no conversion has written."""
        try:
            preset: Preset = shaped(manifest.preset, cls, "preset")
        except (Misshapen, UsageError) as error:
            raise DataError(f"data set {manifest.dataset}: its manifest: {error}") from None
        return preset

    def changes(self, size: tuple[int, int], image: ImageInfo) -> bool:
        """Return True unless an image of that size, once upright, may keep its bytes.

        A JPEG that need not shrink may: encoding it again would cost quality.
        """
        is_usual = image.extension == "jpg" and "cmyk" not in image.oddities
        may_stay = is_usual and self.target(*size) == size and not self.encodes_all
        return not (self.passes_through or may_stay)


@dataclass(frozen=True)
class StoredImage:
    """The bytes of an image as a shard has them."""

    data: bytes
    info: ImageInfo
    crc: int


@dataclass(frozen=True)
class Treatment:
    """The steps that all images of a data set go through; equal bytes become equal bytes."""

    preset: Preset
    upright: bool

    def stored(self, record: Record, container: Container) -> StoredImage:
        """Return what is stored of a record; raise Defect if the image cannot be used."""
        from rackrun.shards.pillow import foreign_formats

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
        resizes = self.preset.changes(size, source)
        if not (resizes or turns or is_foreign):
            return data, source
        stored, changed = io.BytesIO(), "re-encoded" if is_foreign else "turned"
        try:
            with warnings.catch_warnings(action="ignore"):
                image = _decoded(data, FINE * min(self.preset.target(*size)) if resizes else 0)
                image = turned(image) if turns else image
                if resizes:
                    image, quality = self.preset.resized(image), self.preset.jpeg_quality
                    image.save(stored, "JPEG", quality=quality, subsampling="4:2:0")
                else:
                    image = in_mode(image, "L" if image.mode == "L" else "RGB")
                    image.save(stored, "JPEG", quality=UPRIGHT_QUALITY, subsampling="4:4:4")
        except UNDECODABLE as error:
            raise Defect("undecodable", reason(error)) from None
        oddities = [kind for kind in source.oddities if not (turns and kind == "rotated")]
        oddities += [changed] * (is_foreign or turns)
        return stored.getvalue(), ImageInfo("jpg", *image.size, tuple(oddities))


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
