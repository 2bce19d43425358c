"""The loss of a batch and weights of classes by their definitions; where training ends."""

import math

import numpy as np
import pytest
import torch

from rackrun.training.counts import Counts
from rackrun.training.divergence import SMALLEST_SCALE, Diverged, check_finite
from rackrun.training.loss import class_weights, summed_loss
from rackrun.training.settings.optim import OptimSettings


@pytest.mark.parametrize("loss", ["ce", "bce"])
def test_a_rare_class_is_not_named_for_others(loss):
    """--loss-weights balanced with smoothing: one sample of a class beside 1,000 of each other
    one, and a class without any: each sample learns its own label."""
    labels = torch.tensor([0, 1, 2])
    counts = np.array([1000, 1000, 1, 0])
    weights = class_weights("balanced", ("a", "b", "rare", "none"), lambda: counts)
    config = OptimSettings(loss=loss, label_smoothing=0.1)
    logits = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(300):
        (gradient,) = torch.autograd.grad(summed_loss(logits, labels, config, weights), logits)
        with torch.no_grad():
            logits -= gradient / gradient.norm(dim=1, keepdim=True).clamp(min=1e-9) / 10
    assert logits.argmax(1).tolist() == [0, 1, 2]


def test_binary_cross_entropy_of_labels_is_that_of_their_shares():
    """A label is its class with share 1; a share that equals the threshold counts as 0."""
    logits = torch.tensor([[0.3, -1.2, 0.5], [-0.4, 0.9, 0.1]], dtype=torch.float64)
    labels = torch.tensor([1, 0])  # no sample of the last class
    shares = torch.eye(3, dtype=torch.float64)[labels]
    plain = OptimSettings(loss="bce", label_smoothing=0.3)
    probability = 1 / (1 + np.exp(-logits.numpy()))
    smooth = shares.numpy() * 0.7 + 0.1
    each = -(smooth * np.log(probability) + (1 - smooth) * np.log(1 - probability)).mean(1)
    for targets in (labels, shares):
        assert abs(float(summed_loss(logits, targets, plain)) - each.sum()) < 1e-12
    equal = OptimSettings(loss="bce", bce_threshold=0.5)
    half = torch.full((2, 3), 0.5, dtype=torch.float64)
    none = -np.log(1 - probability).mean(1).sum()
    assert abs(float(summed_loss(logits, half, equal)) - none) < 1e-12


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
def test_weights_are_1_on_average_over_the_samples(text, expected):
    """So the rate keeps its meaning; `balanced` gives each class the same share of the loss."""
    weights = class_weights(text, CLASSES, lambda: SAMPLES)
    assert weights is not None
    assert weights.tolist() == pytest.approx(expected)
    assert float(weights.numpy() @ SAMPLES) == pytest.approx(100)


def test_balanced_classes_of_one_sample_and_of_none_have_finite_weights():
    """That of a class without samples changes no loss."""
    weights = class_weights("balanced", CLASSES, lambda: np.array([3, 1, 0]))
    assert weights is not None and weights.tolist() == pytest.approx([2 / 3, 2, 2])


@pytest.mark.parametrize(
    ("counts", "loss_scale", "says"),
    [
        (Counts(math.nan, samples=1), 0, "the loss is nan at step 7: type a lower --lr"),
        (Counts(math.inf, samples=1), 1, "loss is inf .*, or --precision fp32"),
        (Counts(1.0, samples=1), SMALLEST_SCALE / 2, "overflow float16 at any scale"),
    ],
)
def test_training_that_cannot_go_on_ends(counts, loss_scale, says):
    """With what to type."""
    with pytest.raises(Diverged, match=says):
        check_finite(7, counts, loss_scale)
