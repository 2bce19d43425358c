"""What a task must say; everything else is the loop's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from training.preparation import Preparation


@dataclass(frozen=True)
class Task:
    """A task: how its model is built and how its pictures are prepared.

    Both functions take the task's own settings (a `Config` with fields added), which no type here
    needs to know: hence `Any`.
    """

    name: str
    """Its package, which also names its run folders."""
    model: Callable[[Any, int], nn.Module]
    """(settings, number of classes) -> the model, freshly initialised."""
    preparation: Callable[[Any, int], Preparation]
    """(settings, epoch) -> how pictures are prepared in that epoch."""
    synthetic_classes: int = 2
    """How many classes the random labels of --synthetic have."""
