"""Pixels: the same as the reference transforms, whatever the file, and errors for what is none."""

import io
import random
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageFile
from torchvision.transforms import v2
from torchvision.transforms.functional import resized_crop as reference_crop

from rackrun.errors import DataError
from rackrun.training.data import decode as decoder
from rackrun.training.data.decode import Box, Region, decode, draw_box, region_of, whole
from tests.lab.data import encoded, photograph

# Mean absolute difference to the reference, in gray levels of 255:
SAME = 0.3  # of any one image decoded at its full resolution
SAME_ON_AVERAGE = 0.03  # of many of them
SIMILAR = 1.5  # of any one image that libjpeg has decoded at a fraction of its resolution
SIMILAR_ON_AVERAGE = 0.5  # of many random crops

CROP_SIZES = [(375, 500), (500, 333), (333, 500), (97, 101), (1, 40), (231, 17), (256, 256)]


def reference(data: bytes) -> Image.Image:
    """Return the image as torchvision's ImageFolder loads it."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def crop(data: bytes, choose: Callable[[int, int], Box], side: float) -> Region:
    """Return the pixels of a part of an image."""
    return region_of(data, choose, side)


def difference(ours: NDArray[np.uint8], image: Image.Image) -> float:
    """Return the mean absolute difference in gray levels."""
    return float(np.abs(ours.astype(int) - np.asarray(image).astype(int)).mean())


JPEGS: dict[str, Callable[[Image.Image], bytes]] = {
    "color": lambda image: encoded(image, quality=90),
    "full color": lambda image: encoded(image, quality=95, subsampling="4:4:4"),
    "half color": lambda image: encoded(image, quality=95, subsampling="4:2:2"),
    "progressive": lambda image: encoded(image, quality=90, progressive=True),
    "restart markers": lambda image: encoded(image, quality=90, restart_marker_rows=1),
    "gray": lambda image: encoded(image.convert("L"), quality=90),
    "CMYK": lambda image: encoded(image.convert("CMYK"), quality=90),
}


@pytest.mark.parametrize("kind", JPEGS)
def test_a_thousand_random_crops_are_those_of_torchvision(kind):
    """A crop decodes only what it needs and is the reference's crop within the stated tolerance."""
    draw = random.Random(kind)
    datas = [JPEGS[kind](photograph(seed, *size)) for seed, size in enumerate(CROP_SIZES)]
    pictures = [(data, reference(data)) for data in datas]
    differences = []
    for count in range(1000 // len(JPEGS) + 1):
        data, image = pictures[count % len(pictures)]
        box = draw_box(*image.size, draw, (0.08, 1.0), (3 / 4, 4 / 3))
        differences.append(crop_difference(data, image, box, 112))
    assert max(differences) < SAME
    assert np.mean(differences) < SAME_ON_AVERAGE


def crop_difference(data: bytes, image: Image.Image, box: Box, size: int) -> float:
    """Return the distance of our crop from torchvision's crop and resize of the same box."""
    ours = crop(data, lambda width, height: box, size).resized(size)
    return difference(ours, torchvision_crop(image, box, size))


def torchvision_crop(image: Image.Image, box: Box, size: int) -> Image.Image:
    """Return the box of an image, resized as torchvision does it."""
    return reference_crop(
        image, box.top, box.left, box.height, box.width, [size, size], antialias=True
    )


@pytest.mark.parametrize("kind", JPEGS)
def test_decoding_only_the_rows_of_a_crop_changes_no_pixel(kind):
    """Wherever the crop ends, its pixels are those of the whole image, to the last row."""
    data = JPEGS[kind](photograph(3, 150, 90))
    pixels = np.asarray(reference(data))
    for bottom in range(1, 151):
        region = crop(data, lambda w, h, bottom=bottom: Box(0, 0, 90, bottom), 224)
        assert np.array_equal(region.pixels, pixels[:bottom]), bottom


def test_a_large_image_is_decoded_at_a_lower_resolution_and_looks_the_same():
    """A crop several times the wanted size costs less, within the stated tolerance.

    Wherever it was drawn, also between two pixels of the lower resolution, and without a shift.
    """
    draw = random.Random(1)
    differences, within_a_pixel = [], 0
    for size, side in [((1001, 1334), 56), ((1501, 997), 32), ((1337, 1333), 96)]:
        data = encoded(photograph(9, *size), quality=90)
        image = reference(data)
        for _ in range(24):
            box = draw_box(*image.size, draw, (0.25, 1.0), (3 / 4, 4 / 3))
            cut = crop(data, lambda width, height, box=box: box, side)
            assert (cut.shrink > 1) == (min(box.width, box.height) >= 4 * side)
            assert cut.box == box
            within_a_pixel += bool(box.left % cut.shrink or box.top % cut.shrink)
            differences.append(difference(cut.resized(side), torchvision_crop(image, box, side)))
    assert within_a_pixel > 40
    assert max(differences) < SIMILAR
    assert np.mean(differences) < SIMILAR_ON_AVERAGE


def test_a_crop_at_a_lower_resolution_is_not_shifted():
    """A ramp of brightness has the reference's brightness, wherever within a pixel it is cut."""
    ramp = np.broadcast_to(np.linspace(0, 255, 1600, dtype=np.float32), (1200, 1600))
    for turned in (False, True):
        image = Image.fromarray((ramp.T if turned else ramp).round().astype(np.uint8))
        data = encoded(image.convert("RGB"), quality=95)
        for offset in range(8):
            box = Box(40 + offset, 40 + offset, 1000, 1000)
            cut = crop(data, lambda width, height, box=box: box, 32).resized(32)
            expected = np.asarray(torchvision_crop(reference(data), box, 32)).astype(float)
            assert abs((cut - expected).mean()) < 0.5, offset  # moved to a whole pixel: 1.4


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("kind", JPEGS)
def test_the_center_is_that_of_resize_and_center_crop(kind, interpolation):
    """Validation sees what the reference of a model sees: resize, then the center."""
    stock = v2.Compose(
        [v2.Resize(73, v2.InterpolationMode(interpolation), antialias=True), v2.CenterCrop(64)]
    )
    for seed, size in enumerate([(375, 500), (500, 333), (97, 101), (200, 80), (73, 73)]):
        data = JPEGS[kind](photograph(seed, *size))
        ours = crop(data, whole, 73).center(73, 64, interpolation)
        result = difference(ours, stock(reference(data)))
        assert result < (SAME if min(size) < 4 * 73 else SIMILAR), size


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers())
def test_a_drawn_box_lies_inside_the_image(width, height, seed):
    """Whatever the shape of the image, the box has pixels and all of them exist."""
    box = draw_box(width, height, random.Random(seed), (0.08, 1.0), (3 / 4, 4 / 3))
    assert box.width >= 1 and box.height >= 1 and box.left >= 0 and box.top >= 0
    assert box.left + box.width <= width and box.top + box.height <= height


def test_drawn_boxes_have_the_areas_and_shapes_that_were_asked_for():
    """The share of the image is uniform, the shape uniform in its logarithm, as published."""
    draw = random.Random(2)
    boxes = [draw_box(1000, 1000, draw, (0.08, 0.5), (3 / 4, 4 / 3)) for _ in range(4000)]
    shares = np.array([box.width * box.height / 1e6 for box in boxes])
    shapes = np.log([box.width / box.height for box in boxes])
    assert shares.min() > 0.079 and shares.max() < 0.501
    assert abs(shares.mean() - 0.29) < 0.01 and abs(shapes.mean()) < 0.02
    assert abs(np.mean([box.left / (1001 - box.width) for box in boxes]) - 0.5) < 0.03


PICTURE = photograph(4, 48, 64)


@pytest.mark.parametrize("kind", ["color", "progressive", "gray", "CMYK"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.99])
def test_a_truncated_image_is_an_error_not_a_gray_area(kind, share):
    """Half an image never trains a model, even when the crop lies in the other half."""
    data = JPEGS[kind](photograph(5, 200, 300))
    data = data[: int(len(data) * share)]
    with pytest.raises(DataError, match="not an? (whole )?image"):
        decode(data)
    with pytest.raises(DataError, match="not an? (whole )?image"):
        crop(data, lambda width, height: Box(0, 0, 32, 16), 32)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def png_that_claims(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes with a huge size in its header."""
    fields = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    header = b"IHDR" + fields
    chunk = struct.pack(">I", len(fields)) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


def jpeg_that_claims(width: int, height: int) -> bytes:
    """Return a JPEG of a few bytes with a huge size in its header."""
    data = bytearray(encoded(PICTURE))
    frame = decoder.jpeg_frame(bytes(data))
    assert frame is not None
    data[frame.height_at : frame.height_at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize("make", [png_that_claims, jpeg_that_claims])
@pytest.mark.parametrize("size", [(65000, 65000), (60000, 1), (1, 60000), (9000, 9000)])
@pytest.mark.security("DATA-3")
def test_a_bomb_is_refused_before_it_is_decoded(make, size):
    """Too many pixels, or a strip that a resize would blow up: an error that says the size."""
    with pytest.raises(DataError, match="pixels"):
        decode(make(*size))


def with_scans(count: int, progressive: bool) -> bytes:
    """Return a JPEG with this many additional scans."""
    data = encoded(PICTURE, quality=90, progressive=progressive)
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2]
    if not progressive:  # of one color each, so that decoders look for further ones
        scan = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + data[last + 14 : -2]
    return data[:last] + scan * count + b"\xff\xd9"


@pytest.mark.parametrize("progressive", [True, False])
def test_a_jpeg_of_too_many_scans_is_refused_before_it_is_decoded(progressive):
    """Each scan passes over the whole image: 0.2 MB of them took 4 s, 8 MB seven minutes."""
    with pytest.raises(DataError, match=r"a JPEG of \d+ scans; at most 100 are read"):
        decode(with_scans(200, progressive))
    usual = encoded(PICTURE, quality=90, progressive=progressive)
    frame = decoder.jpeg_frame(usual)
    assert frame is not None and frame.one_scan is not progressive
    assert decode(usual).shape == (48, 64, 3)


@pytest.mark.parametrize("mark", [b"\xff\x01", b"\xff\xd0", b"\xff", b"\0"])
def test_no_disguise_hides_the_number_of_scans(mark):
    """Bytes that decoders skip between segments do not lead the count into a comment."""
    data = with_scans(200, False)
    at = data.index(b"\xff\xda")
    decoy = b"\xff\xfe\x00\x10" + b"\xff\xda\x00\x0c\x03" + bytes(9)
    with pytest.raises(DataError, match="scans"):
        decode(data[:at] + mark + decoy + data[at:])


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8\xff\xc0", b"hello", b"\0" * 4000])
def test_what_is_no_image_is_an_error(data):
    """Bytes of no named format are refused in a line that names the formats."""
    with pytest.raises(DataError, match=r"JPEG, PNG, GIF, BMP, WEBP"):
        decode(data)


@pytest.mark.security("DATA-3")
def test_other_formats_are_not_tried():
    """A TIFF or an EPS is refused although Pillow could open it."""
    for form in ("TIFF", "EPS", "PPM"):
        with pytest.raises(DataError):
            decode(encoded(PICTURE, form))


@settings(max_examples=150, deadline=None)
@given(st.binary(min_size=1, max_size=40), st.floats(0, 1), st.sampled_from(sorted(JPEGS)))
def test_damaged_bytes_give_pixels_or_a_data_error(junk, where, kind):
    """No damage inside a file leads to anything but pixels or one clear error."""
    data = bytearray(JPEGS[kind](PICTURE))
    at = int(where * (len(data) - 1))
    data[at : at + len(junk)] = junk
    try:
        region = crop(bytes(data), lambda w, h: Box(0, 0, min(w, 9), min(h, 9)), 8)
        assert region.resized(8).shape == (8, 8, 3)
    except DataError as error:
        assert str(error)
