"""The loss of a batch, held against its definition in float64."""

import numpy as np
import pytest
import torch

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
