"""Counts over batches: what they add up to, and where training ends."""

import math

import pytest
import torch

from rackrun.training.counts import (
    SMALLEST_SCALE,
    Counter,
    Counts,
    Scaling,
)
from rackrun.training.divergence import Diverged, check_finite, check_weights

CPU = torch.device("cpu")


def test_means_are_per_image_and_none_of_no_image():
    """Loss in nats, accuracies as shares."""
    counts = Counts(6.0, 2, 3, 4, 1).plus(Counts(2.0, 1, 1, 1, 2))
    assert counts == (8.0, 3, 4, 5, 3)
    assert (counts.mean_loss, counts.accuracy, counts.accuracy5) == (1.6, 0.6, 0.8)
    assert (Counts().mean_loss, Counts().accuracy, Counts().accuracy5) == (0, 0, 0)


def test_a_counter_adds_images_and_those_that_were_skipped():
    """Loss and right answers, in parts."""
    counter = Counter(CPU)
    counter.add([torch.tensor([1.5, 1.0]), torch.tensor([0.5, 0.0])], samples=2, skipped=3)
    counter.add([torch.tensor([1.5, 1.0])], samples=3, skipped=0)
    assert counter.sums.tolist() == [3.5, 2, 0, 5, 3]
    counter.clear()
    assert counter.sums.tolist() == [0] * 5


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


def test_training_that_can_go_on_goes_on():
    """A rank may have no sample in the last step; a scale of 2^-16 is the least of any use."""
    check_finite(7, Counts(math.nan), None)
    check_finite(7, Counts(1.0, samples=1), Scaling(2.0**-16, 32))
    check_weights(7, are_finite=True)
    with pytest.raises(Diverged, match="weights are not finite at step 7"):
        check_weights(7, are_finite=False)
