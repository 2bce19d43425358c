"""Weights of classes in the loss."""

import numpy as np
import pytest

from rackrun.errors import UsageError
from training.data.class_weights import class_weights

CLASSES = ("cat", "dog", "bird")
SAMPLES = np.array([60, 30, 10])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("balanced", [100 / (3 * count) for count in SAMPLES]),
        ("bird=5", [100 / 140, 100 / 140, 500 / 140]),
        ("cat=0,1=2", [0, 200 / 70, 100 / 70]),
    ],
)
def test_weights_are_1_on_average_over_the_samples(text: str, expected: list[float]) -> None:
    """So the rate keeps its meaning; `balanced` gives each class the same share of the loss."""
    weights = class_weights(text, CLASSES, lambda: SAMPLES)
    assert weights is not None
    assert weights.tolist() == pytest.approx(expected)
    assert float(weights.numpy() @ SAMPLES) == pytest.approx(100)


@pytest.mark.parametrize("text", ["cow=2", "cat", "cat=-1", "cat=0,dog=0,bird=0"])
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    """Unknown classes, no weight, a negative one, or nothing left to learn."""
    with pytest.raises(UsageError):
        class_weights(text, CLASSES, lambda: SAMPLES)


def test_without_weights_nothing_is_counted() -> None:
    """The labels of a large data set are not read for nothing."""
    assert class_weights("", CLASSES, lambda: pytest.fail("counted")) is None
