"""Smaller images, made once at conversion: what `--size`, `--short-side`, `--gray` ask for."""

from dataclasses import dataclass

from rackrun.convert.images.info import ImageInfo
from rackrun.errors import DataError, UsageError
from rackrun.shapes import Misshapen, shaped
from rackrun.shards.index import Manifest
from rackrun.shards.resize import Resize


@dataclass(frozen=True)
class Preset(Resize):
    """Size and quality of the stored images; by default, images are not changed."""

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
