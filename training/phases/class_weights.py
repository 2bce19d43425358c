"""The weights of classes in the loss (--loss-weights)."""

from collections.abc import Callable

import numpy as np
import torch

from rackrun.errors import UsageError
from training.data.mixture import BALANCED, class_number, weights_in
from training.ranks import Numbers


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
            weights[class_number(name, classes)] = weight
    total = float(weights @ samples)
    if not total:
        raise UsageError(f"--loss-weights {text}: leaves no sample with a weight")
    return torch.from_numpy(weights * (samples.sum() / total))
