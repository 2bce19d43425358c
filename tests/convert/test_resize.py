"""Smaller images are what was asked for, and look like the originals."""

import io

import numpy as np
import pytest
from PIL import Image

from rackrun.convert.images.info import inspect
from rackrun.convert.images.treatment import Treatment
from rackrun.shards.resize import Resize
from tests.lab.data import drawn


def applied(preset: Resize, data: bytes) -> Image.Image:
    stored, info = Treatment(preset, upright=False).encoded(data, inspect(data, ".jpg"))
    image = Image.open(io.BytesIO(stored))
    assert (info.width, info.height) == image.size
    assert info.extension == "jpg" and image.format == "JPEG"
    return image


@pytest.mark.parametrize(
    ("preset", "size", "expected"),
    [
        (Resize(short_side=60), (200, 100), (120, 60)),
        (Resize(short_side=60), (100, 200), (60, 120)),
        (Resize(size=20), (200, 100), (20, 20)),
        (Resize(gray=True, size=200), (20, 10), (200, 200)),  # the reference preparation
        (Resize(short_side=60), (40, 30), (40, 30)),
        (Resize(gray=True), (40, 30), (40, 30)),
    ],
)
def test_sides_are_as_asked(preset, size, expected):
    """Sides are exact; --short-side never enlarges."""
    image = applied(preset, drawn(2, size))
    assert (image.size, image.mode) == (expected, "L" if preset.gray else "RGB")


def test_small_jpegs_keep_their_bytes():
    """An image that need not shrink is not packed again; with a quality given, it is."""
    data = drawn(4, (50, 40))
    info = inspect(data, ".jpg")
    for quality, is_kept in ((None, True), (50, False)):
        treatment = Treatment(Resize(short_side=40, quality=quality), upright=False)
        assert (treatment.encoded(data, info)[0] is data) == is_kept


def test_decoding_at_a_lower_resolution_costs_no_quality():
    """A large JPEG is decoded at a quarter first: the result is that of decoding it in full."""
    data = drawn(5, (2400, 1800), quality=92)
    whole = Image.open(io.BytesIO(data)).resize((133, 100), Image.Resampling.BICUBIC)
    result = np.asarray(applied(Resize(short_side=100, quality=95), data)).astype(int)
    assert np.abs(result - np.asarray(whole)).mean() < 2
