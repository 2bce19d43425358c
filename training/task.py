"""The definition of a task: its model and transforms. Everything else is in the training loop."""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rackrun.commandline.program import location_in_user_code
from rackrun.errors import UsageError, UserCodeError
from rackrun.terminal import one_line
from rackrun.training.data.transforms import Transforms

OF_MACHINE = re.compile(r"cuda|triton|compil|alloc|memory|\bdevice", re.IGNORECASE)
"""Finds errors that another machine may not have."""
PROBABILITIES = (
    "the model's outputs are probabilities, as of a softmax or sigmoid at its end; the loss takes"
    " logits: leave that out, or training stops far from its best"
)
"""A remark on the first outputs of a model."""


Mix = Callable[[Any, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


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
    mix: Mix | None = None
    """(settings, images, labels, number of classes) -> images and their targets."""
    synthetic_classes: int = 2
    """Classes of the random labels of --synthetic."""

    resolve: Callable[[Any], Any] = lambda config: config
    """settings -> the same with what depends on published weights, before a new run begins."""

    def built(self, config: Any, classes: int) -> nn.Module:
        """Return the model; UsageError if the function returns none."""
        model: object = self.model(config, classes)
        if isinstance(model, nn.Module):
            return model
        raise UsageError(
            f"task {self.name}: {_called(self.model)} returns {type(model).__name__}; return a"
            " torch.nn.Module"
        )

    def transformed(self, config: Any, epoch: int) -> Transforms:
        """Return the transforms of an epoch; UsageError if the function returns none."""
        transforms: object = self.transforms(config, epoch)
        if isinstance(transforms, Transforms):
            if (typed := config.normalization) and typed[0][0] != transforms.mean[0]:
                raise UsageError(
                    f"task {self.name}: {_called(self.transforms)} does not use --mean and --std;"
                    " return rackrun.augmented(rackrun.Transforms(...), config)"
                )
            return transforms
        raise UsageError(
            f"task {self.name}: {_called(self.transforms)} returns {type(transforms).__name__};"
            " return rackrun.Transforms(size)"
        )


def _called(function: Callable[..., object]) -> str:
    return f"{getattr(function, '__name__', 'a function of the task')}()"


@contextmanager
def blamed_on_model(name: str) -> Iterator[None]:
    """Raise UserCodeError, with the line in the user's code if any, for what their model raises.

    torch refuses much in its own lines, which name no model. What may be due to the machine is
    raised as it is.
    """
    try:
        yield
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as e:
        if isinstance(e, NotImplementedError) or OF_MACHINE.search(f"{type(e)}: {e}"):
            raise
        where = location_in_user_code("".join(traceback.format_exception(e)))
        what = f"{type(e).__name__}: {one_line(str(e))[:200]}"
        raise UserCodeError(f"--model {name}: {where and f'{where}: '}{what}") from e


def check_logits(logits: torch.Tensor, samples: int, classes: int) -> None:
    """Raise UsageError for a model with other outputs than one of each class for each image."""
    if logits.shape != (samples, classes):
        raise UsageError(
            f"the model returns {tuple(logits.shape)} for {samples} images of {classes} classes;"
            f" build it with {classes} outputs, to return ({samples}, {classes})"
        )


@torch.no_grad()
def are_probabilities(logits: torch.Tensor) -> bool:
    """Return whether outputs, float (B, classes), are a probability for each class."""
    sums = logits.float().sum(1)
    adds_up = bool((logits >= 0).all() and len(sums) and ((sums - 1).abs() < 1e-3).all())
    return adds_up or _ends_in_sigmoid(logits)


def _ends_in_sigmoid(logits: torch.Tensor) -> bool:
    # Values do not show it: those of two classes lie between 0 and 1 by chance.
    node = logits.grad_fn
    while node and node.name() == "ToCopyBackward0":  # of mixed precision
        node = node.next_functions[0][0]
    return bool(node and node.name() == "SigmoidBackward0")
