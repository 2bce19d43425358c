"""The loss of a batch, held against its definition in float64."""

import numpy as np
import pytest
import torch

from rackrun.training.loss import class_weights, summed_loss
from rackrun.training.settings.optim import OptimSettings


def test_the_threshold_of_bce_applies_to_smoothed_targets():
    """As in timm: with 4 classes and smoothing 0.4, a share of 0.18 becomes 0.208 and counts as 1
    above 0.2, and a share of 0.16 becomes 0.196 and counts as 0; the raw shares are both below."""
    shares = torch.tensor([[0.82, 0.18, 0.0, 0.0], [0.0, 0.16, 0.84, 0.0]], dtype=torch.float64)
    logits = torch.tensor([[0.3, -1.2, 0.7, 0.1], [-0.4, 0.9, 0.2, -0.6]], dtype=torch.float64)
    config = OptimSettings(loss="bce", label_smoothing=0.4, bce_threshold=0.2)
    targets = np.array([[1, 1, 0, 0], [0, 0, 1, 0]])
    probability = 1 / (1 + np.exp(-logits.numpy()))
    each = -(targets * np.log(probability) + (1 - targets) * np.log(1 - probability)).mean(1)
    assert abs(float(summed_loss(logits, shares, config)) - each.sum()) < 1e-12
    weights = torch.tensor([0.5, 2.0, 1.0, 1.0], dtype=torch.float64)
    weighted = each @ (shares @ weights).numpy()
    assert abs(float(summed_loss(logits, shares, config, weights)) - weighted) < 1e-12


def test_cross_entropy_is_summed_with_weights_and_smoothing():
    """Of labels and of shares: each sample counts by the weight of its classes.

    So does what smoothing spreads over all of them.
    """
    logits = torch.tensor([[0.3, -1.2, 0.7], [-0.4, 0.9, 0.2]], dtype=torch.float64)
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    log_shares = logits.numpy() - np.log(np.exp(logits.numpy()).sum(1, keepdims=True))
    for targets in (torch.tensor([2, 1]), torch.tensor([[0.25, 0, 0.75], [0, 0.5, 0.5]])):
        shares = np.eye(3)[targets.numpy()] if targets.ndim == 1 else targets.double().numpy()
        for smoothing in (0.0, 0.3):
            config = OptimSettings(label_smoothing=smoothing)
            smooth = shares * (1 - smoothing) + smoothing / 3
            given = targets if targets.ndim == 1 else targets.double()
            expected = -(smooth * log_shares).sum()
            assert abs(float(summed_loss(logits, given, config)) - expected) < 1e-12
            unsmoothed = -(shares * log_shares * weights.numpy()).sum()
            spread = -(shares @ weights.numpy() @ log_shares.mean(1))
            expected = (1 - smoothing) * unsmoothed + smoothing * spread
            assert abs(float(summed_loss(logits, given, config, weights)) - expected) < 1e-12


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
