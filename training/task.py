"""What a task must say; everything else is the loop's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.data.transforms import Transforms


@dataclass(frozen=True)
class Task:
    """A task: how its model is built and how its pictures are prepared.

    All functions take the task's own settings (a `Config` with fields added), which no type here
    needs to know: hence `Any`.
    """

    name: str
    """Its package, which also names its run folders."""
    model: Callable[[Any, int], nn.Module]
    """(settings, number of classes) -> the model, freshly initialised."""
    transforms: Callable[[Any, int], Transforms]
    """(settings, epoch) -> how pictures are prepared in that epoch."""
    mix: Callable[[Any, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] = (
        lambda config, images, labels, classes: (images, labels)
    )
    """(settings, pictures, labels, number of classes) -> pictures and what is wanted of them."""
    synthetic_classes: int = 2
    """How many classes the random labels of --synthetic have."""
