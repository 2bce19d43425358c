"""The loss: cross-entropy over the classes, or the mean binary cross-entropy of each class.

Targets are labels, int64 (B,), or the shares of classes in mixed images, float (B, classes).
"""

from __future__ import annotations

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from training.settings.optim import OptimSettings


def summed_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    config: OptimSettings,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of the losses of a batch, each weighted by the classes of its sample."""
    if config.loss == "bce":
        return _binary(logits, targets, config, weights)
    smoothing = config.label_smoothing
    return cross_entropy(
        logits, targets, weight=weights, reduction="sum", label_smoothing=smoothing
    )


def _binary(
    logits: torch.Tensor,
    targets: torch.Tensor,
    config: OptimSettings,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Return the sum over a batch of the binary cross-entropy, averaged over classes.

    Smoothing comes before the threshold, as in timm (Wightman et al., 2021, arXiv:2110.00476).
    """
    classes = logits.shape[1]
    shares = (one_hot(targets, classes) if targets.ndim == 1 else targets).to(logits)
    smoothed = shares * (1 - config.label_smoothing) + config.label_smoothing / classes
    if config.bce_threshold:
        smoothed = (smoothed > config.bce_threshold).to(logits)
    losses = binary_cross_entropy_with_logits(logits, smoothed, reduction="none").mean(1)
    return losses.sum() if weights is None else losses @ (shares @ weights)
