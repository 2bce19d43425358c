"""Smaller images, as a conversion stores them, and prediction makes them of files again.

decoded -> RGB or gray -> resized, antialiased -> JPEG, baseline, 4:2:0
"""

import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rackrun.errors import DataError, UsageError
from rackrun.shapes import Misshapen, shaped
from rackrun.shards.index import Manifest

if TYPE_CHECKING:
    from PIL import Image

DEFAULT_QUALITY = 90
FINE = 4  # a JPEG is decoded at a half, a quarter … if that leaves this many times the wanted side


@dataclass(frozen=True)
class Resize:
    """Size and quality of the stored images; by default, images are not changed."""

    gray: bool = False
    """Store one channel instead of three."""
    size: int | None = None
    """Width and height in pixels; the aspect ratio is not kept."""
    short_side: int | None = None
    """Length of the shorter side in pixels; smaller JPEGs keep their bytes."""
    quality: int | None = None
    """JPEG quality, 1 to 95; 90 if images are resized or made gray."""

    def __post_init__(self) -> None:
        if self.size is not None and self.short_side is not None:
            raise UsageError("--size and --short-side exclude each other")
        for name, side in (("--size", self.size), ("--short-side", self.short_side)):
            if side is not None and not 1 <= side <= 4096:
                raise UsageError(f"{name} {side}: 1 to 4096 pixels are possible")
        if self.quality is not None and not 1 <= self.quality <= 95:
            raise UsageError(f"--quality {self.quality}: 1 to 95 is possible")

    @classmethod
    def of(cls, manifest: Manifest) -> "Resize":
        """Return what the conversion of a data set changed in its images.

        DataError for what no conversion has written.
        """
        try:
            made: Resize = shaped(manifest.preset, cls, "preset")
        except (Misshapen, UsageError) as error:
            raise DataError(f"data set {manifest.dataset}: its manifest: {error}") from None
        return made

    @property
    def passes_through(self) -> bool:
        """Return True if the original bytes are wanted."""
        return not (self.encodes_all or self.shrinks)

    @property
    def encodes_all(self) -> bool:
        """Return True if every image is encoded again, also one of the right size."""
        return self.size is not None or self.gray or self.quality is not None

    @property
    def shrinks(self) -> bool:
        """Return True if large images become small."""
        return self.size is not None or self.short_side is not None

    @property
    def jpeg_quality(self) -> int:
        """Return the quality of images that are resized or made gray."""
        return DEFAULT_QUALITY if self.quality is None else self.quality

    def described(self) -> str:
        """Return it as options: --gray --size 64; empty if images are not changed."""
        options = ((name.replace("_", "-"), value) for name, value in vars(self).items() if value)
        return " ".join(
            f"--{name}" if value is True else f"--{name} {value}" for name, value in options
        )

    def after(self, earlier: "Resize") -> "Resize":
        """Return what makes in one step of an image what the earlier one and then this one make."""
        size, short_side = self.size, self.short_side
        sides = [side for side in (short_side, earlier.size or earlier.short_side) if side]
        if size is None and earlier.size:
            size, short_side = min(sides), None
        elif size is None:
            short_side = min(sides, default=None)
        gray, quality = self.gray or earlier.gray, self.quality or earlier.quality
        return replace(self, gray=gray, size=size, short_side=short_side, quality=quality)

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of what is made of an image."""
        if self.size is not None:
            return self.size, self.size
        scale = min(1.0, self.short_side / min(width, height)) if self.short_side else 1.0
        return max(1, round(width * scale)), max(1, round(height * scale))

    def keeps(self, size: tuple[int, int], is_jpeg: bool) -> bool:
        """Return True if an image of that size, once upright, keeps its bytes.

        A JPEG of gray or colors that need not shrink does: encoding it again would cost quality.
        """
        fits = is_jpeg and self.target(*size) == size and not self.encodes_all
        return self.passes_through or fits

    def encoded(self, image: "Image.Image") -> bytes:
        """Return an upright image, resized, as a JPEG."""
        stored = io.BytesIO()
        self.resized(image).save(stored, "JPEG", quality=self.jpeg_quality, subsampling="4:2:0")
        return stored.getvalue()

    def resized(self, image: "Image.Image") -> "Image.Image":
        """Return an upright image, resized."""
        from PIL.Image import Resampling

        image = in_mode(image, "L" if self.gray else "RGB")
        return image.resize(self.target(*image.size), Resampling.BICUBIC)


def in_mode(image: "Image.Image", mode: str) -> "Image.Image":
    """Convert to a mode: transparency is dropped, 16 bits are cut to their upper 8."""
    if image.mode.startswith("I;16"):
        import numpy as np
        from PIL.Image import fromarray

        image = fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P":  # by way of RGBA, or a transparent color costs a warning
        image = image.convert("RGBA")
    color = image if image.mode == "RGB" else image.convert("RGB")  # to convert is to copy
    return color if mode == "RGB" else color.convert(mode)
