"""The loss: cross-entropy over the classes, or the mean binary cross-entropy of each class.

Targets are labels, int64 (B,), or the weights of classes in mixed images, float (B, classes). With
--loss-weights, each sample counts by the weight of its class.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from rackrun.errors import UsageError
from rackrun.training.data.choice import BALANCED, class_number, weights_in
from rackrun.training.ranks import Numbers
from rackrun.training.settings.optim import OptimSettings


def summed_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    config: OptimSettings,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of the losses of a batch, each weighted by the classes of its sample.

    `weights` are those of the classes; None: all count 1.
    """
    if weights is not None:
        weights = weights.to(logits)
    if config.loss == "bce":
        return _binary(logits, targets, config, weights)
    smoothing = config.label_smoothing
    if weights is None:
        return cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    # torch weighs what smoothing spreads over the classes by each of them, and not by the sample's:
    # all samples would learn to name a rare class, whose weight is a hundred times theirs.
    unsmoothed = cross_entropy(logits, targets, weight=weights, reduction="sum")
    even = -logits.log_softmax(1).mean(1)
    return (1 - smoothing) * unsmoothed + smoothing * (even @ _sample_weights(targets, weights))


def _sample_weights(targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # (B,)
    return weights[targets] if targets.ndim == 1 else targets.to(weights) @ weights


def _binary(
    logits: torch.Tensor,
    targets: torch.Tensor,
    config: OptimSettings,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    classes = logits.shape[1]
    # Smoothing comes before the threshold, as in timm (Wightman et al., 2021, arXiv:2110.00476).
    shares = (one_hot(targets, classes) if targets.ndim == 1 else targets).to(logits)
    smoothed = shares * (1 - config.label_smoothing) + config.label_smoothing / classes
    if config.bce_threshold:
        smoothed = (smoothed > config.bce_threshold).to(logits)
    losses = binary_cross_entropy_with_logits(logits, smoothed, reduction="none").mean(1)
    return losses.sum() if weights is None else losses @ _sample_weights(targets, weights)


def class_weights(
    text: str, classes: tuple[str, ...], count: Callable[[], Numbers]
) -> torch.Tensor | None:
    """Return the weight of each class, 1 on average over the training samples; None without any.

    `text` is `balanced`, which gives all classes the same share of the loss, or NAME=WEIGHT,…,
    where classes that are left out have 1. `count` counts the training samples of each class.
    """
    if not text:
        return None
    samples = count()
    weights = np.ones(len(classes))
    if text == BALANCED:
        weights = 1 / np.maximum(samples, 1)
    else:
        for name, weight in weights_in("--loss-weights", text).items():
            weights[class_number("--loss-weights", name, classes)] = weight
    total = float(weights @ samples)
    if not total:
        raise UsageError(f"--loss-weights {text}: leaves no sample with a weight")
    return torch.from_numpy(weights * (samples.sum() / total))
