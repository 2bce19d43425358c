"""Images of every kind look to training and prediction as they do to whoever took them."""

import numpy as np
import pytest

from rackrun.convert.images.info import inspect
from rackrun.convert.images.treatment import Treatment
from rackrun.errors import DataError
from rackrun.shards.pillow import foreign_formats
from rackrun.shards.resize import Resize
from rackrun.training.camera_files import for_prediction
from rackrun.training.data.decode import decode
from rackrun.training.data.transforms import Transforms
from tests.lab.zoo import SIDE, is_alike, zoo

EXACT = (".png", ".gif", ".bmp", ".tif", ".ppm", ".pgm", ".pbm")
WHOLE = Transforms(SIDE)
ZOO = zoo()


@pytest.mark.parametrize("name", sorted(n for n, each in ZOO.items() if each.shown is not None))
def test_a_file_is_shown_upright(name):
    """To prediction the file itself, to training what the conversion has stored of it."""
    data, shown = ZOO[name]
    source = inspect(data, "", foreign_formats())
    stored, _ = Treatment(Resize(), upright=True).encoded(data, source)
    assert is_alike(decode(stored), shown)
    predicted = for_prediction(WHOLE, data)
    assert np.array_equal(predicted, shown) if name.endswith(EXACT) else is_alike(predicted, shown)


@pytest.mark.parametrize("name", sorted(n for n, each in ZOO.items() if each.shown is None))
def test_a_broken_file_is_refused(name):
    """With one line, whichever of the formats it is of, or none of them."""
    with pytest.raises(DataError) as refusal:
        for_prediction(WHOLE, ZOO[name].data)
    assert "\n" not in str(refusal.value)
