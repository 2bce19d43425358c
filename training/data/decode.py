"""Turn the bytes of an image into pixels: decode, crop and resize as one step.

    bytes ──▶ the rows and the resolution the crop needs, uint8 (h, w, 3) ──▶ uint8 (size, size, 3)

A JPEG is decoded by libjpeg-turbo, and only as far as the crop asks: the image ends at the
crop's last row, and a crop that is several times larger than what is wanted is decoded at a half,
a quarter or an eighth. Everything else, and every JPEG that libjpeg-turbo refuses, goes through
Pillow, which has the last word on what an image is. Both give the same pixels.

Whatever the file holds becomes RGB in one way: gray is repeated, a palette looked up, CMYK
inverted, transparency dropped, 16 bits cut to their upper 8; of an animation the first frame
counts. The orientation in EXIF is ignored, as the published baselines do.

Files to predict have not been converted: `as_png`, `as_stored` and `upright` do what the conversion
of the training images did.
"""

import io
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from rackrun.errors import DataError
from rackrun.shards import pillow
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
from rackrun.shards.pillow import foreign_formats, turned
from rackrun.shards.resize import FINE as DRAFT
from rackrun.shards.resize import Resize

FINE = 2  # a crop decoded at a half, a quarter … keeps at least this many times the wanted side
MARGIN = 4  # rows below a crop that its last rows need: colour is smoothed across rows
RATIO = (3 / 4, 4 / 3)  # the least and the greatest width to height of a random crop
CAMERA_MARKS = (b"II*\0", b"MM\0*", *(b"P%d" % kind for kind in range(1, 7)))  # of TIFF and PPM
CAMERA_BOX = b"ftyp"  # from byte 4 on: AVIF and HEIC
UNKNOWN = 1 << 40  # bytes: more than any image that is decoded
TRAILER = 1024  # bytes at the end of a JPEG in which a whole one has its end marker

PILLOW_ERRORS = (*UNDECODABLE, Image.DecompressionBombError)

Pixels = NDArray[np.uint8]
Interpolation = Literal["bilinear", "bicubic"]
KERNELS = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}
"""torch's kernels for bytes, which write to a given place."""
PILLOW_KERNELS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class Random(Protocol):
    """A generator to draw a crop with: `random.Random` or `numpy.random.Generator`."""

    def random(self) -> float:
        """Return a number in [0, 1)."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of an image, in pixels of its full resolution."""

    left: int
    top: int
    width: int
    height: int


Choice = Callable[[int, int], Box]  # (width, height) of an image -> the part of it


@dataclass(frozen=True, slots=True)
class Region:
    """The pixels of a box, at a whole fraction of their resolution."""

    pixels: Pixels
    box: Box
    shrink: int

    @classmethod
    def cut(cls, pixels: Pixels, box: Box, shrink: int) -> "Region":
        """Return the pixels under the box, out of the image at 1/shrink of its size."""
        top, left = box.top // shrink, box.left // shrink
        bottom, right = -(-(box.top + box.height) // shrink), -(-(box.left + box.width) // shrink)
        return cls(pixels[top:bottom, left:right], box, shrink)

    def resized(
        self, size: int, interpolation: Interpolation = "bilinear", out: Pixels | None = None
    ) -> Pixels:
        """Return the whole region as uint8 (size, size, 3), in `out` if given."""
        pixels = np.empty((size, size, 3), np.uint8) if out is None else out
        self._resize(pixels, interpolation)
        return pixels

    def centre(
        self,
        short_side: int,
        size: int,
        interpolation: Interpolation = "bilinear",
        out: Pixels | None = None,
    ) -> Pixels:
        """Return the centre, uint8 (size, size, 3), after a resize to that shorter side."""
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
        left, top = box.left % shrink / shrink, box.top % shrink / shrink
        if left or top:
            # Only Pillow can begin within a pixel. Moving the box to the next whole one instead
            # shifts the image by up to half a pixel of the result, always the same way.
            part = (left, top, left + box.width / shrink, top + box.height / shrink)
            image = Image.fromarray(self.pixels)
            size = out.shape[1], out.shape[0]
            out[:] = np.asarray(image.resize(size, PILLOW_KERNELS[interpolation], part))
            return
        scales = out.shape[0] * shrink / box.height, out.shape[1] * shrink / box.width
        # torch.nn.functional.interpolate calls the same kernel, but cannot write to a given place.
        kernel = KERNELS[interpolation]
        kernel(_planes(self.pixels), out.shape[:2], False, *scales, out=_planes(out))


class PreparedCrop(NamedTuple):
    """A part of an image that is known but not decoded yet."""

    held_bytes: int  # of memory, by what is decoded for it; UNKNOWN of what Pillow decodes
    decode: Callable[[], Region]
    """Raises DataError if the image is damaged."""


def decode(data: bytes) -> Pixels:
    """Return the whole image, uint8 (height, width, 3); DataError if it is damaged or too large."""
    return crop(data, whole, math.inf).pixels


def crop(data: bytes, choose: Choice, side: float) -> Region:
    """Decode what `choose(width, height)` names, no finer than a result of `side` pixels needs."""
    return prepared_crop(data, choose, side).decode()


def prepared_crop(data: bytes, choose: Choice, side: float) -> PreparedCrop:
    """Choose the part that `crop` decodes, by the header of a JPEG."""
    frame = jpeg_frame(data)
    may_be_progressive = not (frame and frame.one_scan) and data[:2] == START
    if may_be_progressive and (scan_count := scans(data)) > MAX_SCANS:  # it would hold up a step
        raise DataError(f"a JPEG of {scan_count} scans; at most {MAX_SCANS} are read")
    if frame is None:
        return PreparedCrop(UNKNOWN, partial(_with_pillow, data, choose))
    _check_size(frame.width, frame.height)
    box = choose(frame.width, frame.height)
    # A crop decoded at the greatest of these divisors still has FINE times the wanted resolution.
    spare = min(box.width, box.height) / (FINE * side)
    shrink = next((divisor for divisor in (8, 4, 2) if spare >= divisor), 1)
    rows = min(frame.height, box.top + box.height + MARGIN * shrink)
    held_bytes = 3 * frame.width * rows // shrink**2
    return PreparedCrop(held_bytes, partial(_with_turbo, data, frame, box, rows, shrink))


def prepared_random_crop(
    data: bytes,
    size: int,
    rng: Random,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = RATIO,
) -> PreparedCrop:
    """Draw a random part of the image, decoded no finer than a result of `size` pixels needs.

    The part is drawn as torchvision's RandomResizedCrop draws it: its area as a share of the
    image from `scale`, its width to height from `ratio`.
    """
    choose: Choice = lambda width, height: draw_box(width, height, rng, scale, ratio)  # noqa: E731
    return prepared_crop(data, choose, size)


def mirrored(pixels: Pixels) -> Pixels:
    """Return uint8 (height, width, channels) with left and right exchanged, in the same memory."""
    memory = torch.from_numpy(pixels)
    memory.copy_(memory.flip(1))
    return pixels


def is_of_camera(data: bytes) -> bool:
    """Return whether a file is a TIFF, AVIF, HEIC or PPM, which a conversion makes a JPEG of."""
    return data.startswith(CAMERA_MARKS) or data[4:8] == CAMERA_BOX


def as_stored(data: bytes, conversion: Resize) -> bytes:
    """Return the bytes that a conversion would have stored of an image; DataError for none."""
    if conversion.passes_through:
        return data
    try:
        image = Image.open(io.BytesIO(data), formats=tuple(FORMATS))
        _check_size(*image.size)
        target = conversion.target(*image.size)
        is_usual = image.format == "JPEG" and image.mode != "CMYK"
        if is_usual and target == image.size and not conversion.encodes_all:
            return data
        side = DRAFT * min(target)
        image.draft(None, (side, side))
        stored = io.BytesIO()
        quality = conversion.jpeg_quality
        conversion.resized(image).save(stored, "JPEG", quality=quality, subsampling="4:2:0")
    except UnidentifiedImageError as error:
        raise DataError(f"not an image ({', '.join(FORMATS)})") from error
    except PILLOW_ERRORS as error:
        raise DataError(f"not a whole image: {error}") from error
    return stored.getvalue()


def as_png(data: bytes) -> bytes:
    """Return a TIFF, AVIF, HEIC or PPM as an upright PNG; DataError where that cannot be done."""
    try:
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(io.BytesIO(data), formats=foreign_formats())
            _check_size(*image.size)
            if image.mode in ("F", "I"):
                raise ValueError(f"pixels of {image.mode} have no known range")
            pixels = _rgb(turned(image))
    except UnidentifiedImageError as error:
        needs = "" if "HEIF" in foreign_formats() else "; for HEIC type pip install pillow-heif"
        raise DataError(f"not a TIFF, AVIF or HEIC image that can be read here{needs}") from error
    except PILLOW_ERRORS as error:
        raise DataError(f"not a whole image: {error}") from error
    stored = io.BytesIO()
    Image.fromarray(pixels).save(stored, "PNG", compress_level=0)
    return stored.getvalue()


def orientation(data: bytes) -> int:
    """Return the orientation of an image file; 1, upright, if it names none."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return pillow.orientation(Image.open(io.BytesIO(data), formats=tuple(FORMATS)))
    except PILLOW_ERRORS:
        return 1


def upright(square: Pixels, data: bytes) -> Pixels:
    """Return the centre of an image, uint8 (side, side, channels), turned as its file says."""
    turn = orientation(data)
    if turn == 1:
        return square
    turned = square.transpose(1, 0, 2) if turn > 4 else square
    across = -1 if turn in (2, 3, 6, 7) else 1
    down = -1 if turn in (3, 4, 7, 8) else 1
    return np.ascontiguousarray(turned[::down, ::across])


def draw_box(
    width: int, height: int, rng: Random, scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """Draw a box inside the image; after ten misses the largest central one within `ratio`."""
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


def _between(limits: tuple[float, float], rng: Random) -> float:
    return limits[0] + (limits[1] - limits[0]) * rng.random()


def whole(width: int, height: int) -> Box:
    """Return the box of a whole image."""
    return Box(0, 0, width, height)


def _with_pillow(data: bytes, choose: Choice) -> Region:
    image = _pillow(data)
    return Region.cut(_rgb(image), choose(*image.size), 1)


def _with_turbo(data: bytes, frame: Frame, box: Box, rows: int, shrink: int) -> Region:
    if rows < frame.height and has_end(data):
        # Decoders stop at the height in the header. To a strict one, the rest would be damage.
        shorter = bytearray(data)
        shorter[frame.height_at : frame.height_at + 2] = rows.to_bytes(2, "big")
        pixels = _decoded(shorter, frame.width, rows, shrink, strict=False)
    else:
        pixels = _decoded(data, frame.width, frame.height, shrink, strict=True)
    if pixels is None:
        return _with_pillow(data, lambda width, height: box)
    return Region.cut(pixels, box, shrink)


def _decoded(
    data: bytes | bytearray, width: int, height: int, shrink: int, strict: bool
) -> Pixels | None:
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data,
            min_height=-(-height // shrink),
            min_width=-(-width // shrink),
            min_factor=shrink,
            strict=strict,
        )
    except ValueError:  # libjpeg-turbo refuses
        return None
    return pixels


def has_end(data: bytes) -> bool:
    """Return True if a JPEG has its end marker where that of a whole one is."""
    return data.rfind(END, -TRAILER) >= 0


def _pillow(data: bytes) -> Image.Image:
    # The one place that decides what is no image: whatever another decoder refuses comes here.
    try:
        image = Image.open(io.BytesIO(data), formats=tuple(FORMATS))
        _check_size(*image.size)
        image.load()
    except UnidentifiedImageError as error:
        raise DataError(f"not an image ({', '.join(FORMATS)})") from error
    except PILLOW_ERRORS as error:
        raise DataError(f"not a whole image: {error}") from error
    return image


def _rgb(image: Image.Image) -> Pixels:
    if image.mode.startswith("I;16"):
        return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
    if image.mode == "P":  # by way of RGBA, or a transparent colour costs a warning
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))


def _check_size(width: int, height: int) -> None:
    if too_large(width, height):
        raise DataError(
            f"the image is {width}x{height} pixels; at most {MAX_PIXELS:,} in all and "
            f"{MAX_ASPECT} times longer than wide are read"
        )


def _planes(pixels: Pixels) -> torch.Tensor:
    return torch.from_numpy(pixels[None].transpose(0, 3, 1, 2))  # (1, 3, H, W), channels last
