"""The loss of a batch, held against its definition in float64."""

import numpy as np
import torch

from training.config import OptimSettings
from training.phases.loss import summed_loss


def test_the_threshold_of_bce_applies_to_smoothed_targets() -> None:
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
