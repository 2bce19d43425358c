"""Counts over batches: what they add up to, and where training ends."""

import math

import pytest

from rackrun.training.counts import Counts, Scaling
from rackrun.training.divergence import SMALLEST_SCALE, Diverged, check_finite


@pytest.mark.parametrize(
    ("counts", "scaling", "says"),
    [
        (Counts(math.nan, samples=1), None, "the loss is nan at step 7: type a lower --lr"),
        (Counts(math.inf, samples=1), Scaling(1, 0), "loss is inf .*, or --precision fp32"),
        (Counts(1.0, samples=1), Scaling(SMALLEST_SCALE / 2, 3), "overflow float16 at any scale"),
    ],
)
def test_training_that_cannot_go_on_ends(counts, scaling, says):
    """With what to type."""
    with pytest.raises(Diverged, match=says):
        check_finite(7, counts, scaling)
