"""When an option of training has an effect, as a table; what is typed without one is refused.

Defaults are not refused but adapted, and one of the run's first lines names them
(training/first_lines.py). Nothing here imports torch.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rackrun.commandline.conditions import (
    Condition,
    as_typed,
    changed_settings,
    refuse_without_effect,
)
from rackrun.commands import called
from rackrun.data_location import are_plain_tars
from rackrun.errors import UsageError
from rackrun.training.config import Config
from rackrun.training.settings.optim import BODY

Settings = TypeVar("Settings", bound=Config)


def _only_with(name: str, value: str, *options: str) -> Condition:
    option = f"--{name.replace('_', '-')}"
    return Condition(
        options,
        lambda config: getattr(config, name) == value,
        f"{option} is {{config.{name}}}",
        f"{option} {value}",
    )


CONDITIONS = (
    Condition(
        ("lr",),
        lambda config: config.epochs > config.head_epochs,
        "--head-epochs {config.head_epochs} of --epochs {config.epochs} leave no epoch in which all"
        " layers train, and the last layer alone trains at --head-lr",
        "--head-epochs 0, or more --epochs",
    ),
    Condition(
        ("head_lr",),
        lambda config: config.head_epochs > 0,
        "no epoch trains the last layer alone",
        "--head-epochs 2, or --lr",
    ),
    Condition(
        ("patience", "plateau_epochs"),
        lambda config: config.epochs > config.head_epochs,
        "evaluations count after --head-epochs {config.head_epochs}, which are all",
        "more --epochs",
    ),
    Condition(
        ("layer_decay",),
        lambda config: config.epochs > config.head_epochs and BODY not in config.freeze.split(","),
        "only the last layer trains",
        "no --freeze body, and more --epochs than --head-epochs",
    ),
    _only_with("lr_schedule", "plateau", "plateau_epochs"),
    _only_with("lr_schedule", "step", "step_epochs"),
    _only_with("optimizer", "sgd", "momentum", "nesterov"),
    Condition(
        ("nesterov",), lambda config: config.momentum > 0, "--momentum is 0", "--momentum 0.9"
    ),
    _only_with("loss", "bce", "bce_threshold"),
    Condition(
        ("ema_steps",), lambda config: config.ema_decay > 0, "--ema-decay is 0", "--ema-decay 0.999"
    ),
    Condition(
        ("shuffle_buffer",),
        lambda config: not config.exact_epochs,
        "exact epochs use no shuffle buffer",
    ),
    Condition(
        ("cache_size", "prefetch"),
        lambda config: bool(config.cache),
        "no --cache",
        "--cache FOLDER",
    ),
    _only_with("bad_samples", "quarantine", "bad_samples_limit"),
    Condition(
        ("classes", "num_classes", "label_field", "eval_data"),
        lambda config: are_plain_tars(config.data),
        "the index of a data set has its classes and splits; this is for tars without one",
    ),
    Condition(
        ("cache", "eval_split"),
        lambda config: not are_plain_tars(config.data),
        "tars without an index have no splits, and no digests to keep them by",
        "--eval-data TARS to evaluate",
    ),
)

EVALUATED = ("patience", "plateau_epochs", "eval_flip", "eval_every_epochs")
"""Options without effect where there is no split to evaluate."""
WITHOUT_EVALUATION: Mapping[str, Any] = {"patience": 0, "lr_schedule": "cosine", "final": "last"}
"""What takes the place of defaults that need a split to evaluate."""
BY_EVALUATION = {"lr_schedule": "plateau", "final": "best"}
"""Values that need one."""


def with_weights_or_all_layers(config: Settings, typed: Collection[str]) -> Settings:
    """Return settings in which all layers train from the first epoch if no weights are loaded.

    To train the last layer first protects the weights of the others; there are none to protect.
    """
    loads = config.weights and not config.synthetic
    if loads or "head_epochs" in typed:
        return config
    return replace(config, head_epochs=0)


def refuse_ineffective(config: Config, typed: Collection[str]) -> None:
    """Raise UsageError for options among these that change nothing, each with what to type."""
    refuse_without_effect(config, typed, (*CONDITIONS, *config.own_conditions))


def refuse_evaluations(config: Config, typed: Collection[str]) -> None:
    """Raise UsageError for options among these that need a split to evaluate."""
    names = [name for name in EVALUATED if name in typed and getattr(config, name)]
    names += [
        name
        for name, value in BY_EVALUATION.items()
        if name in typed and getattr(config, name) == value
    ]
    why = (
        f"{config.data} has no split {config.eval_split!r} to evaluate; leave it out, or hold one"
        f" out with {called('convert')}"
    )
    if are_plain_tars(config.data):
        why = "there is nothing to evaluate; leave it out, or type --eval-data TARS"
    problems = [f"{as_typed(config, name)} has no effect: {why}" for name in names]
    if problems:
        raise UsageError("; ".join(problems))


def without_evaluation(config: Settings) -> Settings:
    """Return settings for data without a split to evaluate; UsageError where these need one.

    A default adapts. The command line is not known here, so that what differs from the recipe's
    defaults stands for what was typed.
    """
    refuse_evaluations(config, changed_settings(config))
    adapted = {
        name: value
        for name, value in WITHOUT_EVALUATION.items()
        if getattr(config, name) == BY_EVALUATION.get(name, getattr(config, name))
    }
    return replace(config, **adapted)


def adapted_defaults(config: Config) -> str:
    """Return, as options, what `without_evaluation` has put in place of a recipe's defaults."""
    return " ".join(
        as_typed(config, name)
        for name, value in WITHOUT_EVALUATION.items()
        if getattr(config, name) == value != getattr(type(config), name)
    )
