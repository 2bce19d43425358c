"""The definition of a task: its model and transforms. Everything else is in the training loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.data.transforms import Transforms


@dataclass(frozen=True)
class Task:
    """A task: how its model is built and how its images are transformed.

    All functions take the task's own settings (a `Config` with fields added), which no type here
    needs to know: hence `Any`.
    """

    name: str
    """Names it in checkpoints and, without a launcher, its run folders."""
    model: Callable[[Any, int], nn.Module]
    """(settings, number of classes) -> the model, freshly initialised."""
    transforms: Callable[[Any, int], Transforms]
    """(settings, epoch) -> how images are transformed in that epoch."""
    mix: Callable[[Any, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] = (
        lambda config, images, labels, classes: (images, labels)
    )
    """(settings, images, labels, number of classes) -> images and their targets."""
    synthetic_classes: int = 2
    """Classes of the random labels of --synthetic."""
