"""Mistakes in the numbers of training, each of which a test has to notice.

A mutation replaces one name by another of the same kind. None of them makes a run fail, and most
models learn with all of them: only a comparison with other code shows them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

Function = Callable[..., Any]


@dataclass(frozen=True)
class Mutation:
    """A mistake: where it is made, and what it makes of the right function."""

    name: str
    module: str
    place: str
    """The function's name in the module, after its class and a dot if it has one."""
    wrong: Callable[[Function], Function]
    ranks: int = 1
    """The number of ranks it takes to be one."""

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the mistake."""
        owner: Any = import_module(self.module)
        *inside, name = self.place.split(".")
        for each in inside:
            owner = getattr(owner, each)
        with patch.object(owner, name, self.wrong(getattr(owner, name))):
            yield


def _rankless(right: Function) -> Function:
    return lambda config, ranks, step: right(config, replace(ranks, rank=0), step)


def _best_only(right: Function) -> Function:
    return lambda outputs, labels, first: right(outputs, labels, 1)


def _long_average(right: Function) -> Function:
    return lambda self, model, step: right(self, model, 10**9)


def _ten_times(right: Function) -> Function:
    return lambda weights, limit: right(weights, 10 * limit)


def _a_step_late(right: Function) -> Function:
    return lambda self, step: right(self, max(step - 1, 0))


def _squared(right: Function) -> Function:
    return lambda self, answers: right(self, answers) ** 2


def _unflipped(right: Function) -> Function:
    return lambda self, model, transforms, images, flip=False: right(
        self, model, transforms, images
    )


STEP = "training.phases.step"
MUTATIONS = (
    Mutation(
        "squared weights of classes", "training.phases.start", "TrainingRun.class_weights", _squared
    ),
    Mutation("no mirror images in evaluations", "training.device", "Compute.answers", _unflipped),
    Mutation(
        "no label smoothing",
        "training.phases.loss",
        "cross_entropy",
        lambda right: lambda *args, label_smoothing, **options: right(*args, **options),
    ),
    Mutation("top-5 is top-1", "training.counts", "correct_predictions", _best_only),
    Mutation("ten times the clipping norm", STEP, "clip_grad_norm_", _ten_times),
    Mutation("the same chance on all ranks", STEP, "seed_step", _rankless, ranks=2),
    Mutation("no warm-up of the average", "training.optim.ema", "Average.update", _long_average),
    Mutation("equal shares in mixup", "imagenet.mixing", "_share", lambda right: lambda _: 0.5),
    Mutation("the learning rate a step late", "training.schedule", "Schedule.lr", _a_step_late),
    Mutation(
        "plain momentum",
        "training.optim.optimizer",
        "SGD",
        lambda right: lambda *args, nesterov, **options: right(*args, **options),
    ),
    Mutation(
        "decay of biases",
        "training.optim.groups",
        "without_decay",
        lambda right: lambda model: set(),
    ),
    Mutation(
        "images turned by a channel",
        "training.data.transforms",
        "Transforms.normalised",
        lambda right: lambda self, images: right(self, images.roll(1, 1)),
    ),
    Mutation(
        "gradients of a part left out",
        STEP,
        "parts_of",
        lambda right: lambda *args: list(right(*args))[:1],
    ),
)
