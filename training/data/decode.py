"""Turn the bytes of an image into pixels: choose a part, decode it, resize it.

    bytes -> Region, uint8 (h, w, 3) -> uint8 (size, size, 3)

A JPEG is decoded by libjpeg-turbo, and only as far as the crop asks: the image ends at the
crop's last row, and a crop that is several times larger than what is wanted is decoded at a half,
a quarter or an eighth. Everything else, and every JPEG that libjpeg-turbo refuses, goes through
Pillow, which has the last word on what an image is. Both give the same pixels.

Whatever the file holds becomes RGB in one way: gray is repeated, a palette looked up, CMYK
inverted, transparency dropped, 16 bits cut to their upper 8; of an animation the first frame
counts. The orientation in EXIF is ignored, as the published baselines do.
"""

import io
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch.nn.functional import interpolate

from rackrun.errors import DataError
from rackrun.shards import pillow  # noqa: F401 - sets the limits of Pillow
from rackrun.shards.images import (
    END,
    FORMATS,
    MAX_ASPECT,
    MAX_PIXELS,
    MAX_SCANS,
    START,
    UNDECODABLE,
    Frame,
    jpeg_frame,
    scans,
    too_large,
)
from rackrun.shards.resize import in_mode

FINE = 2  # a crop decoded at a half, a quarter … keeps at least this many times the wanted side
MARGIN = 4  # rows below a crop that its last rows need: color is smoothed across rows
RATIO = (3 / 4, 4 / 3)  # the least and the greatest width to height of a random crop
TRAILER = 1024  # bytes at the end of a JPEG in which a whole one has its end marker

PILLOW_ERRORS = (*UNDECODABLE, Image.DecompressionBombError)

Pixels = NDArray[np.uint8]
Interpolation = Literal["bilinear", "bicubic"]
PILLOW_KERNELS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class Box(NamedTuple):
    """A part of an image, in pixels of its full resolution."""

    left: int
    top: int
    width: int
    height: int


BoxChooser = Callable[[int, int], Box]  # (width, height) of an image -> the part of it


class Region(NamedTuple):
    """The pixels of a box, at a whole fraction of their resolution."""

    pixels: Pixels
    box: Box
    shrink: int
    held_bytes: int
    """Bytes of memory that decoding for it took."""

    @classmethod
    def cut(cls, pixels: Pixels, box: Box, shrink: int) -> "Region":
        """Return the pixels under the box, out of the image at 1/shrink of its size."""
        top, left = box.top // shrink, box.left // shrink
        bottom, right = -(-(box.top + box.height) // shrink), -(-(box.left + box.width) // shrink)
        return cls(pixels[top:bottom, left:right], box, shrink, pixels.nbytes)

    def resized(
        self, size: int, interpolation: Interpolation = "bilinear", out: Pixels | None = None
    ) -> Pixels:
        """Return the whole region as uint8 (size, size, 3), in `out` if given."""
        pixels = np.empty((size, size, 3), np.uint8) if out is None else out
        self._resize(pixels, interpolation)
        return pixels

    def center(
        self,
        short_side: int,
        size: int,
        interpolation: Interpolation = "bilinear",
        out: Pixels | None = None,
    ) -> Pixels:
        """Return the center, uint8 (size, size, 3), after a resize to that shorter side."""
        height, width = self.box.height, self.box.width
        sides = height * short_side // min(height, width), width * short_side // min(height, width)
        resized = np.empty((*sides, 3), np.uint8)
        self._resize(resized, interpolation)
        top, left = (round((side - size) / 2) for side in sides)
        pixels = np.empty((size, size, 3), np.uint8) if out is None else out
        pixels[:] = resized[top : top + size, left : left + size]
        return pixels

    def _resize(self, out: Pixels, interpolation: Interpolation) -> None:
        box, shrink = self.box, self.shrink
        if any(edge % shrink for edge in box):
            # Only Pillow can begin and end within a pixel. Moving the box to whole ones instead
            # shifts the image by up to half a pixel of the result, always the same way.
            left, top = box.left % shrink / shrink, box.top % shrink / shrink
            part = (left, top, left + box.width / shrink, top + box.height / shrink)
            image = Image.fromarray(self.pixels)
            size = out.shape[1], out.shape[0]
            out[:] = np.asarray(image.resize(size, PILLOW_KERNELS[interpolation], part))
            return
        resized = interpolate(
            _planes(self.pixels), out.shape[:2], mode=interpolation, antialias=True
        )
        _planes(out).copy_(resized)


def region_of(data: bytes, choose: BoxChooser, side: float) -> Region:
    """Choose a part by the header, and decode it no finer than a result of `side` pixels needs.

    DataError if the file is no image, damaged, or too large.
    """
    frame = jpeg_frame(data)
    may_be_progressive = not (frame and frame.one_scan) and data[:2] == START
    if may_be_progressive and (scan_count := scans(data)) > MAX_SCANS:  # it would hold up a step
        raise DataError(f"a JPEG of {scan_count} scans; at most {MAX_SCANS} are read")
    if frame is None:
        image = _opened(data)
        box = choose(*image.size)
        return Region.cut(_with_pillow(image), box, 1)
    check_size(frame.width, frame.height)
    box = choose(frame.width, frame.height)
    # A crop decoded at the greatest of these divisors still has FINE times the wanted resolution.
    spare = min(box.width, box.height) / (FINE * side)
    shrink = next((divisor for divisor in (8, 4, 2) if spare >= divisor), 1)
    rows = min(frame.height, box.top + box.height + MARGIN * shrink)
    pixels = _with_turbo(data, frame, rows, shrink)
    if pixels is None:
        return Region.cut(_with_pillow(_opened(data)), box, 1)
    return Region.cut(pixels, box, shrink)


def decode(data: bytes) -> Pixels:
    """Return the whole image, uint8 (height, width, 3); DataError if it is damaged or too large."""
    return region_of(data, whole, math.inf).pixels


def whole(width: int, height: int) -> Box:
    """Return the box of a whole image."""
    return Box(0, 0, width, height)


def draw_box(
    width: int,
    height: int,
    rng: np.random.Generator,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = RATIO,
) -> Box:
    """Draw a box inside the image as torchvision's RandomResizedCrop draws it.

    Its area as a share of the image is from `scale`, its width to height from `ratio`; after ten
    misses it is the largest central one within `ratio`.
    """
    log_ratio = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        area = width * height * _between(scale, rng)
        aspect = math.exp(_between(log_ratio, rng))
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            left = int((width - across + 1) * rng.random())
            top = int((height - down + 1) * rng.random())
            return Box(left, top, across, down)
    aspect = min(max(width / height, ratio[0]), ratio[1])
    across = min(width, max(1, round(height * aspect)))
    down = min(height, max(1, round(width / aspect)))
    return Box((width - across) // 2, (height - down) // 2, across, down)


def _between(limits: tuple[float, float], rng: np.random.Generator) -> float:
    return limits[0] + (limits[1] - limits[0]) * rng.random()


def check_size(width: int, height: int) -> None:
    """Raise DataError for an image that is larger than any that is read."""
    if too_large(width, height):
        raise DataError(
            f"the image is {width}x{height} pixels; at most {MAX_PIXELS:,} in all and "
            f"{MAX_ASPECT} times longer than wide are read"
        )


def _with_turbo(data: bytes, frame: Frame, rows: int, shrink: int) -> Pixels | None:
    """Return the first rows of a JPEG at 1/shrink of its size; None where libjpeg-turbo refuses."""
    has_end = data.rfind(END, -TRAILER) >= 0  # where that of a whole one is
    is_cut, stored = rows < frame.height and has_end, bytearray()
    if is_cut:
        # Decoders stop at the height in the header. To a strict one, the rest would be damage.
        stored += data
        stored[frame.height_at : frame.height_at + 2] = rows.to_bytes(2, "big")
    height = rows if is_cut else frame.height
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            stored if is_cut else data,
            min_height=-(-height // shrink),
            min_width=-(-frame.width // shrink),
            min_factor=shrink,
            strict=not is_cut,
        )
    except ValueError:
        return None
    return pixels


def _with_pillow(image: Image.Image) -> Pixels:
    # The one place that decides what is no image: whatever another decoder refuses comes here.
    try:
        image.load()
    except PILLOW_ERRORS as error:
        raise DataError(f"not a whole image: {error}") from error
    return np.array(in_mode(image, "RGB"))


def _opened(data: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=tuple(FORMATS))
    except UnidentifiedImageError as error:
        raise DataError(f"not an image ({', '.join(FORMATS)})") from error
    except PILLOW_ERRORS as error:
        raise DataError(f"not a whole image: {error}") from error
    check_size(*image.size)
    return image


def _planes(pixels: Pixels) -> torch.Tensor:
    # (1, 3, H, W), channels last, also by the stride between images, which [None] makes 0: torch
    # would take it for planar, and be slower.
    return torch.from_numpy(pixels).unsqueeze(0).permute(0, 3, 1, 2)
