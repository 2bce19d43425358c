"""From an image of a source to what a shard stores: checked, turned upright, resized, tiled."""

import zlib
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from convert.images.info import ImageInfo, inspect
from convert.images.reencode import as_upright_jpeg
from convert.images.resize import Preset
from convert.images.tiles import Untiled, tiled
from convert.readers.records import REENCODED_SUFFIXES, Container, Defect, Record


@dataclass(frozen=True)
class StoredImage:
    """The bytes of an image as a shard has them."""

    data: bytes
    info: ImageInfo
    crc: int
    source: ImageInfo
    """The facts before it was resized."""
    untiled: str
    """Why it has no restart tiles, where it should have some."""


@dataclass(frozen=True)
class Treatment:
    """The steps that all images of a data set go through; equal bytes become equal bytes."""

    preset: Preset
    tiles: bool
    check: str
    upright: bool

    def stored(self, record: Record, container: Container) -> StoredImage:
        """Return what is stored of a record; raise Defect if the image cannot be used."""
        data = container.read(record)
        crc = zlib.crc32(data)
        if record.crc not in (None, crc):
            raise Defect("checksum")
        stored, source = self._inspected(data, PurePosixPath(record.name).suffix.lower())
        stored, info = self.preset.apply(stored, source, self.tiles)
        untiled = ""
        if self.tiles:
            try:
                stored = tiled(stored)
            except Untiled as reason:
                untiled = str(reason)
        if stored is not data:
            crc = zlib.crc32(stored)
        return StoredImage(stored, info, crc, source, untiled)

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
