"""Turn the bytes of an image into the input of a model.

    bytes -> uint8 (size, size, 3) -> uint8 (size, size, channels) -> batch -> float, normalized

All but the last arrow happen in the loader's workers, the last one on the device. The whole is
plain numbers, so that final.pt can hold it and `predict` can repeat it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch

from rackrun.errors import UsageError
from rackrun.shapes import Misshapen, Real, at_most, between
from rackrun.shards.resize import Resize
from rackrun.training.data.decode import (
    Interpolation,
    Pixels,
    Region,
    draw_box,
    region_of,
    whole,
)
from rackrun.training.settings.data import ImageSettings
from rackrun.units import plural

LARGEST_SIDE = 8192  # pixels
Side = Annotated[int, between(1, LARGEST_SIDE)]
Shape = tuple[int, int, int]  # of an image: size, size, channels
LUMA = np.array([19595, 38470, 7471], np.uint32)  # ITU-R 601 in parts of 2^16, as Pillow's "L"


class Decoded(NamedTuple):
    """The part of an image that was chosen, and its other random changes."""

    region: Region
    mirror: bool = False
    random: np.random.Generator | None = None
    """None: the image is for evaluation."""


@dataclass(frozen=True)
class Transforms:
    """Size, channels, crop and normalization of a task's images."""

    size: Side
    """Side of the square that the model sees, in pixels."""
    evaluation_size: Annotated[int, between(0, LARGEST_SIDE)] = 0
    """Side of the square in evaluation, in pixels; 0: the same."""
    channels: Literal[1, 3] = 3
    """3: color; 1: gray."""
    short_side: Annotated[int, between(0, LARGEST_SIDE)] = 0
    """Shorter side before the center is cut out, in pixels; 0: squeeze the whole image."""
    crop_area: Annotated[float, between(0, 1)] = 1.0
    """Smallest share of the area that a training crop keeps; 1: training sees no random crops."""
    interpolation: Interpolation = "bilinear"
    """Kernel of the resize, always antialiased."""
    flip: bool = True
    """Mirror half of the training images."""
    vertical_flip: bool = False
    """Turn half of the training images upside down."""
    color_jitter: Annotated[float, between(0, 1)] = 0.0
    """Largest relative change of brightness, contrast and saturation."""
    trivial_augment: bool = False
    """Change each training image by one operation of random strength."""
    rand_augment: Annotated[int, between(0, 30)] = 0
    """Strength of two random operations on each training image; 0: none."""
    erase: Annotated[float, between(0, 1)] = 0.0
    """Share of training images in which a rectangle is covered by the mean color."""
    mean: Annotated[tuple[Real, ...], at_most(3)] = (0.485, 0.456, 0.406)
    """Subtracted from each channel, on a scale from 0 to 1."""
    deviation: Annotated[tuple[Annotated[float, between(1e-6, 1e6)], ...], at_most(3)] = (
        0.229,
        0.224,
        0.225,
    )
    """Divisor of each channel after that."""

    conversion: Resize = Resize()
    """What the conversion changed in the training images; prediction does the same to files."""
    upright: bool = True
    """Turn files to predict upright by their EXIF, as the conversion turned the training images."""

    def check(self) -> None:
        """Raise Misshapen unless the fields fit together, in a file from elsewhere."""
        if not len(self.mean) == len(self.deviation) == self.channels:
            raise Misshapen(f"preparation: mean and deviation of {self.channels} channels")
        if self.short_side and self.short_side < (self.evaluation_size or self.size):
            raise Misshapen("preparation: a center crop larger than the image")
        resize = self.conversion
        for side in (resize.size, resize.short_side):
            if side is not None and not 1 <= side <= LARGEST_SIDE:
                raise Misshapen(f"preparation: a side of {side} pixels")
        if resize.quality is not None and not 1 <= resize.quality <= 95:
            raise Misshapen(f"preparation: quality {resize.quality}")

    def described(self) -> str:
        """Return what evaluation shows the model, in words."""
        side = self.evaluation_size or self.size
        whole = f"{side} of {self.short_side} px" if self.short_side else f"{side} px, squeezed"
        color = "" if self.channels == 3 else "gray, "
        normalization = "ImageNet's mean and std"
        if (self.mean, self.deviation) != (Transforms.mean, Transforms.deviation):
            mean, std = (",".join(f"{n:g}" for n in each) for each in (self.mean, self.deviation))
            normalization = f"mean {mean}, std {std}"
        changed = self.conversion.described() + (" --exif ignore" if not self.upright else "")
        converted = f", converted with {changed.strip()}" if changed else ""
        return f"{whole}, {color}{normalization}{converted}"

    @property
    def evaluation_shape(self) -> Shape:
        """Return the shape of an image as evaluation sees it."""
        side = self.evaluation_size or self.size
        return side, side, self.channels

    @property
    def training_shape(self) -> Shape:
        """Return the shape of an image as training sees it."""
        return (self.size, self.size, self.channels) if self._crops else self.evaluation_shape

    @property
    def _crops(self) -> bool:
        return self.crop_area < 1

    def decoded(self, data: bytes, random: np.random.Generator | None = None) -> Decoded:
        """Choose and decode a part of an image; without `random`, as evaluation sees it.

        DataError if the bytes are no whole image. `write` is another step so that loader workers
        can do each for a group of images: they evict one another from the processor's caches.
        """
        side = self.short_side or self.evaluation_shape[0]
        if random is None:
            return Decoded(region_of(data, whole, side))
        mirror = random.random() < (0.5 if self.flip else 0.0)
        if not self._crops:
            return Decoded(region_of(data, whole, side), mirror, random)
        draw = partial(draw_box, rng=random, scale=(self.crop_area, 1.0))
        return Decoded(region_of(data, draw, self.size), mirror, random)

    def write(self, out: Pixels, decoded: Decoded) -> None:
        """Write an image into `out`, uint8 (side, side, channels), as the model sees it."""
        region, mirror, random = decoded
        square = out if self.channels == 3 else None
        if random is not None and self._crops:
            pixels = region.resized(self.size, self.interpolation, square)
        elif self.short_side:
            side = self.evaluation_shape[0]
            pixels = region.center(self.short_side, side, self.interpolation, square)
        else:
            pixels = region.resized(self.evaluation_shape[0], self.interpolation, square)
        if self.channels == 1:
            out[:, :, 0] = (pixels @ LUMA + 0x8000) >> 16
        if mirror:
            torch.from_numpy(out).copy_(torch.from_numpy(out).flip(1))
        if random is not None:
            self._augment(out, random)

    def for_evaluation(self, data: bytes) -> Pixels:
        """Return what evaluation sees: uint8 (side, side, channels)."""
        out = np.empty(self.evaluation_shape, np.uint8)
        self.write(out, self.decoded(data))
        return out

    def for_training(self, data: bytes, random: np.random.Generator) -> Pixels:
        """Return the image as training sees it, cropped and augmented."""
        out = np.empty(self.training_shape, np.uint8)
        self.write(out, self.decoded(data, random))
        return out

    def _augment(self, out: Pixels, random: np.random.Generator) -> None:
        pixels = out
        if self.vertical_flip and random.random() < 0.5:
            pixels = np.ascontiguousarray(pixels[::-1])
        changes = (self.color_jitter, self.trivial_augment, self.rand_augment)
        if any(changes) or self.erase:
            from rackrun.training.data import (
                augment,  # torchvision's transforms take a second to import
            )

            for change in augment.changes(*changes):
                pixels = augment.changed(pixels, change, random)
            pixels = augment.erased(pixels, self.erase, self.mean, random)
        if pixels is not out:
            out[:] = pixels

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Return float32 of the shape of `images`: uint8 (B, channels, size, size), any device.

        Color is innermost in memory. Row by row, with the factors of a whole row beside it, a CPU
        takes a sixth of the time that it takes color by color.
        """
        factor, offset = _row(self, images.shape[3], images.device)
        pixels = images.permute(0, 2, 3, 1)
        rows = torch.addcmul(offset, pixels.flatten(2).float(), factor)
        return rows.view(pixels.shape).permute(0, 3, 1, 2)


EpochTransforms = Sequence[Transforms]
"""The transforms of each epoch: images may grow with the epochs."""


def augmented(transforms: Transforms, config: ImageSettings) -> Transforms:
    """Return the transforms with the normalization and the changes by chance in the settings."""
    mean, deviation = transforms.mean, transforms.deviation
    if typed := config.normalization:
        mean, deviation = (_by_channel(values, transforms.channels) for values in typed)
    return replace(
        transforms,
        mean=mean,
        deviation=deviation,
        flip=config.flip,
        vertical_flip=config.vertical_flip,
        color_jitter=config.color_jitter,
        trivial_augment=config.trivial_augment,
        rand_augment=config.rand_augment,
        erase=config.random_erasing,
    )


def _by_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) not in (1, channels):
        raise UsageError(
            f"--mean and --std: {len(values)} numbers for images of {plural(channels, 'channel')}"
        )
    return values if len(values) == channels else values * channels


@cache
def _row(
    transforms: Transforms, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:  # factors and offsets: float32 (width * channels)
    mean, deviation = torch.tensor([transforms.mean, transforms.deviation], device=device)
    return (1 / (255 * deviation)).repeat(width), (-mean / deviation).repeat(width)
