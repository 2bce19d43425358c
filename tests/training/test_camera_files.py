"""Files to predict look to a model as if they had been converted."""

import numpy as np
import pytest
from PIL import Image

from rackrun.convert.images.info import inspect
from rackrun.convert.images.treatment import Treatment
from rackrun.errors import DataError
from rackrun.shards.pillow import foreign_formats
from rackrun.shards.resize import Resize
from rackrun.training.camera_files import for_prediction
from rackrun.training.data.decode import decode
from rackrun.training.data.transforms import Transforms
from tests.lab.data import encoded, photograph

PHOTO = photograph(3, 40, 40)
WHOLE = Transforms(40)


@pytest.mark.parametrize(
    "preset", [Resize(gray=True), Resize(size=30), Resize(short_side=20), Resize(quality=5)]
)
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_what_a_conversion_changed_is_done_again(preset, form):
    """A file to predict becomes, byte for byte, what would have been stored of it."""
    data = encoded(photograph(5, 64, 48), form, quality=95)
    source = inspect(data, "", foreign_formats(), preset.shrinks)
    stored, _ = Treatment(preset, upright=True).encoded(data, source)
    repeating = Transforms(24, short_side=28, conversion=preset)
    plain = Transforms(24, short_side=28)
    assert np.array_equal(for_prediction(repeating, data), plain.for_evaluation(stored))
    assert not np.array_equal(for_prediction(repeating, data), for_prediction(plain, data))


def test_images_that_a_conversion_left_lying_are_not_turned():
    """As --exif ignore had it for the images of the training."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(PHOTO, quality=95, exif=exif)
    assert np.array_equal(for_prediction(Transforms(40, upright=False), data), decode(data))


@pytest.mark.parametrize(
    "exif", [b"", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM"]
)
def test_malformed_exif_turns_nothing(exif):
    """Such a file counts as upright."""
    data = encoded(PHOTO, quality=95, exif=exif)
    assert np.array_equal(for_prediction(WHOLE, data), decode(data))


def test_one_that_is_too_large_is_refused():
    """Before its pixels are unpacked; 100 times as long as wide is the most."""
    data = encoded(Image.new("L", (101, 1)), "TIFF")
    with pytest.raises(DataError, match="100 times longer than wide"):
        for_prediction(WHOLE, data)
    for_prediction(WHOLE, encoded(Image.new("L", (1, 100)), "TIFF"))
