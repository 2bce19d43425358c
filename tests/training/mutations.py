"""Mistakes in the numbers of training, each of which a test has to notice.

A mutation replaces one name by another of the same kind. None of them makes a run fail, and most
models learn with all of them: only a comparison with other code shows them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

from torch.optim import Adam

Function = Callable[..., Any]


@dataclass(frozen=True)
class Mutation:
    """A mistake: where it is made, and what it makes of the right function."""

    name: str
    module: str
    target: str
    """The function's name in the module, after its class and a dot if it has one."""
    wrong: Callable[[Function], Function]
    ranks: int = 1
    """The number of ranks it takes to be one."""
    recipe: str = "sgd"
    """The recipe that notices it, of those in reference_ranks.py."""

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the mistake."""
        owner: Any = import_module(self.module)
        *inside, name = self.target.split(".")
        for each in inside:
            owner = getattr(owner, each)
        with patch.object(owner, name, self.wrong(getattr(owner, name))):
            yield


def _rankless(right: Function) -> Function:
    return lambda config, ranks, step: right(config, replace(ranks, rank=0), step)


def _long_average(right: Function) -> Function:
    return lambda self, model, step: right(self, model, 10**9)


def _ten_times(right: Function) -> Function:
    return lambda weights, limit: right(weights, 10 * limit)


def _a_step_late(right: Function) -> Function:
    return lambda self, step: right(self, max(step - 1, 0))


def _squared(right: Function) -> Function:
    return lambda self, predictions: right(self, predictions) ** 2


def _unsmoothed(right: Function) -> Function:
    return lambda logits, targets, config, weights: right(
        logits, targets, replace(config, label_smoothing=0.0), weights
    )


def _unflipped(right: Function) -> Function:
    return lambda self, model, transforms, images, flip=False: right(
        self, model, transforms, images
    )


def _own_momenta(right: Function) -> Function:
    def hand_over(state: Any, ranks: Any, source: int) -> None:
        ours = deepcopy(state.optimizer.state_dict())
        right(state, ranks, source)
        state.optimizer.load_state_dict(ours)

    return hand_over


def _by_its_own_samples(right: Function) -> Function:
    return lambda outputs, *rest: right(outputs, *rest) * (6 / len(outputs))


def _at_every_step(right: Function) -> Function:
    return lambda self, model, step: right(self, model, step * self.every)


def _coupled(right: Function) -> Function:
    return lambda groups, **options: Adam(groups, **options)


STEP = "rackrun.training.train"
MUTATIONS = (
    Mutation(
        "squared weights of classes",
        "rackrun.training.setup",
        "TrainingRun.weights_for",
        _squared,
    ),
    Mutation(
        "no mirror images in evaluations", "rackrun.training.device", "Compute.logits", _unflipped
    ),
    Mutation("no label smoothing", STEP, "summed_loss", _unsmoothed),
    Mutation("ten times the clipping norm", STEP, "clip_grad_norm_", _ten_times),
    Mutation("the same chance on all ranks", STEP, "seed_step", _rankless, ranks=2),
    Mutation(
        "no warm-up of the average", "rackrun.training.state", "Average.update", _long_average
    ),
    Mutation(
        "the learning rate a step late", "rackrun.training.schedule", "Schedule.lr", _a_step_late
    ),
    Mutation(
        "plain momentum",
        "rackrun.training.optimizer",
        "SGD",
        lambda right: lambda *args, nesterov, **options: right(*args, **options),
    ),
    Mutation(
        "decay of biases",
        "rackrun.training.optimizer",
        "without_decay",
        lambda right: lambda model: set(),
    ),
    Mutation(
        "images turned by a channel",
        "rackrun.training.data.transforms",
        "Transforms.normalised",
        lambda right: lambda self, images: right(self, images.roll(1, 1)),
    ),
    Mutation(
        "gradients of a part left out",
        STEP,
        "split",
        lambda right: lambda *args: right(*args)[:1],
    ),
    Mutation(
        "decay in Adam's gradient", "rackrun.training.optimizer", "AdamW", _coupled, recipe="adamw"
    ),
    Mutation(
        "an average of every step",
        "rackrun.training.state",
        "Average.update",
        _at_every_step,
        recipe="adamw",
    ),
    Mutation(
        "a whole step for the few samples of a tail",
        STEP,
        "summed_loss",
        _by_its_own_samples,
        recipe="tails",
    ),
    Mutation(
        "own momenta after a tail",
        "rackrun.training.sync.uneven_inputs",
        "broadcast_state",
        _own_momenta,
        ranks=2,
        recipe="tails",
    ),
    Mutation(
        "own moments after a tail",
        "rackrun.training.sync.uneven_inputs",
        "broadcast_state",
        _own_momenta,
        ranks=2,
        recipe="adamw, tails",
    ),
)
