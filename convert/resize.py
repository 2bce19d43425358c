"""Smaller pictures, made once at conversion: what `--size`, `--short-side`, `--gray` ask for.

bytes -> decoded -> RGB or gray -> resized, antialiased -> JPEG, baseline, 4:2:0 -> bytes
"""

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convert.image_info import UNDECODABLE, ImageInfo
from convert.readers.records import Defect
from rackrun.errors import UsageError
from shards.image_limits import FORMATS

if TYPE_CHECKING:
    from PIL import Image

DEFAULT_QUALITY = 90
FINE = 4  # a JPEG is decoded at a half, a quarter … if that leaves this many times the wanted side


@dataclass(frozen=True)
class Preset:
    """What becomes of each picture; with the defaults its bytes stay as they are."""

    gray: bool = False
    """One channel in place of three."""
    size: int | None = None
    """Width and height, whatever the picture's own ratio (pixels)."""
    short_side: int | None = None
    """Length of the shorter side; smaller pictures stay as they are (pixels)."""
    long_side: int | None = None
    """Length of the longer side; smaller pictures stay as they are (pixels)."""
    quality: int | None = None
    """JPEG quality, 1 to 95; 90 where pictures are resized or turned gray."""

    def __post_init__(self) -> None:
        sides = {
            "--size": self.size,
            "--short-side": self.short_side,
            "--long-side": self.long_side,
        }
        asked = {name: side for name, side in sides.items() if side is not None}
        if len(asked) > 1:
            raise UsageError(f"{' and '.join(asked)} exclude each other")
        for name, side in asked.items():
            if not 1 <= side <= 4096:
                raise UsageError(f"{name} {side}: 1 to 4096 pixels are possible")
        if self.quality is not None and not 1 <= self.quality <= 95:
            raise UsageError(f"--quality {self.quality}: 1 to 95 is possible")

    @property
    def passes_through(self) -> bool:
        """Whether the original bytes are wanted."""
        return self == Preset()

    def apply(self, data: bytes, look: ImageInfo) -> tuple[bytes, ImageInfo]:
        """The picture as it shall be stored, and how it looks then; Defect if it is damaged."""
        if self.passes_through or self._is_small_enough(look):
            return data, look
        try:
            with warnings.catch_warnings(action="ignore"):
                image = self._resized(_decoded(data, self._decoded_side(look)))
        except UNDECODABLE as error:
            raise Defect("undecodable", str(error)) from None
        stored = io.BytesIO()
        quality = DEFAULT_QUALITY if self.quality is None else self.quality
        image.save(stored, "JPEG", quality=quality, subsampling="4:2:0")
        return stored.getvalue(), ImageInfo("jpg", *image.size, look.oddities)

    def _is_small_enough(self, look: ImageInfo) -> bool:
        """A JPEG that need not shrink would only lose by being packed again."""
        only_shrinks = self.size is None and not self.gray and self.quality is None
        stays = self._target(look.width, look.height) == (look.width, look.height)
        return only_shrinks and stays and look.extension == "jpg" and "cmyk" not in look.oddities

    def _decoded_side(self, look: ImageInfo) -> int:
        """How large the shorter side must be decoded at least (pixels)."""
        return FINE * min(self._target(look.width, look.height))

    def _resized(self, image: "Image.Image") -> "Image.Image":
        from PIL.Image import Resampling

        image = _in_mode(image, "L" if self.gray else "RGB")
        return image.resize(self._target(*image.size), Resampling.BICUBIC)

    def _target(self, width: int, height: int) -> tuple[int, int]:
        if self.size is not None:
            return self.size, self.size
        scale = min(
            1.0,
            self.short_side / min(width, height) if self.short_side else 1.0,
            self.long_side / max(width, height) if self.long_side else 1.0,
        )
        return max(1, round(width * scale)), max(1, round(height * scale))


def _decoded(data: bytes, side: int) -> "Image.Image":
    """The picture, decoded at the lowest resolution whose shorter side is at least `side`."""
    from PIL import Image

    image = Image.open(io.BytesIO(data), formats=tuple(FORMATS))
    image.draft(None, (side, side))
    image.load()
    return image


def _in_mode(image: "Image.Image", mode: str) -> "Image.Image":
    """The one conversion: transparency is dropped, 16 bits are cut to their upper 8."""
    if image.mode.startswith("I;16"):
        import numpy as np
        from PIL.Image import fromarray

        image = fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P":  # by way of RGBA, or a transparent colour costs a warning
        image = image.convert("RGBA")
    return image.convert("RGB").convert(mode)
