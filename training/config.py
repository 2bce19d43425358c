"""All settings of a run: each exists once, as a field of a slice, with its default and its unit.

The command line is made from these fields. They come in slices (training/settings), and a function
takes the slice that it reads; `Config` is all of them, so that options, recipes and config.json
stay flat. A recipe is a subclass with other defaults; a task adds fields of its own the same way.
Nothing here imports torch, so that `--help` answers at once.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import ClassVar, TypeVar

from rackrun.commandline.command import SettingsCommand
from rackrun.commandline.conditions import Condition
from rackrun.commandline.help_page import Head
from rackrun.commandline.parser import parsed
from rackrun.data_location import with_joined_data
from rackrun.errors import UsageError
from rackrun.training.settings.data import DataSettings, ImageSettings
from rackrun.training.settings.optim import OptimSettings, TuningSettings
from rackrun.training.settings.ranks import DeviceSettings, SyncSettings
from rackrun.training.settings.run import OutputSettings, RunSettings
from rackrun.user_code.sources import nearest

OTHER_SPELLINGS = {
    "--learning-rate": "--lr",
    "--num-epochs": "--epochs",
    "--max-epochs": "--epochs",
    "--num-workers": "--workers",
    "--wd": "--weight-decay",
    "--opt": "--optimizer",
    "--arch": "--model",
    "--splitshards": "--exact-epochs",
    "--resampled": "--no-exact-epochs",
}
"""Options as other training programs call them."""

PRECISION = "--precision bf16, which is the default where all GPUs have it"

INSTEAD = {
    **dict.fromkeys(("--amp", "--amp-dtype", "--bf16", "--fp16", "--use-amp"), PRECISION),
    **dict.fromkeys(("--aa", "--auto-augment"), "--trivial-augment or --rand-augment 9"),
    **dict.fromkeys(("--crop-pct", "--val-resize-size"), "--short-side"),
    **dict.fromkeys(("--decay-epochs", "--lr-step-size", "--step-size"), "--step-epochs"),
    **dict.fromkeys(("--drop", "--drop-rate"), "--model-args drop_rate=0.2, as the model calls it"),
    "--drop-path": "--model-args drop_path_rate=0.1, as the model calls it",
    "--early-stopping": "--patience",
    **dict.fromkeys(("--ema", "--model-ema"), "--ema-decay 0.9999"),
    "--experiment": "--name",
    "--initial-checkpoint": "--weights FILE",
    **dict.fromkeys(("--input-size", "--train-crop-size"), "--image-size"),
    **dict.fromkeys(("--log-interval", "--print-freq"), "--log-every-steps"),
    **dict.fromkeys(("--log-wandb", "--wandb"), "--track wandb"),
    **dict.fromkeys(("--output", "--output-dir", "--save-dir"), "--runs"),
    "--pretrained": "--weights imagenet",
    "--ra-magnitude": "--rand-augment",
    **dict.fromkeys(("--ra-reps", "--ra-sampler"), "--aug-repeats"),
    "--recovery-interval": "--save-steps",
    "--reprob": "--random-erasing",
    "--sched": "--lr-schedule",
    "--start-epoch": "--resume RUN",
    "--use-deterministic-algorithms": "--deterministic",
    "--vflip": "--vertical-flip",
}
"""Options of timm and torchvision's references -> what to type instead."""

Settings = TypeVar("Settings", bound="Config")


@dataclass(frozen=True)
class Config(  # dataclasses collect the fields of the last base first, as --help shows them
    OutputSettings,
    DeviceSettings,
    SyncSettings,
    OptimSettings,
    TuningSettings,
    ImageSettings,
    DataSettings,
    RunSettings,
):
    """Train an image classifier on a folder of shards."""

    own_conditions: ClassVar[tuple[Condition, ...]] = ()
    """When the options that a task adds have an effect."""

    def __post_init__(self) -> None:
        """Refuse what cannot be right, all of it in one sentence (UsageError)."""
        if problems := self.problems():
            raise UsageError("; ".join(problems))

    def problems(self) -> list[str]:
        """Refuse what one slice asks for and another rules out."""
        problems = super().problems()
        if self.batch_size % max(self.grad_accum_steps, 1):
            problems.append(
                f"--grad-accum-steps {self.grad_accum_steps} does not divide --batch-size"
                f" {self.batch_size}"
            )
        if self.balance == "auto" and self.synthetic:
            problems.append(
                "--balance auto and --synthetic exclude each other: the images of each rank are"
                " fixed; type --balance even"
            )
        return problems


HEAD = Head(
    "{prog} [options]",
    "{about}",
    (
        ("{prog} --data data/shards", "train on a folder of shards"),
        ("{prog} --data data/shards --epochs 5", "with other settings"),
        ("{prog} --data data/shards --resume latest", "resume the newest run"),
        ("{prog} --synthetic --epochs 1", "measure speed"),
        ("{prog} predict runs/latest photos/", "classify images"),
    ),
)
"""The head of a task's help."""


def from_command_line(
    recipes: Mapping[str, type[Settings]], prog: str, args: Sequence[str]
) -> tuple[Settings, set[str]]:
    """Return the settings of the recipe that `--recipe` names, changed by the other options.

    Beside them are the names of the fields that were typed.
    """
    name, args = "default", with_joined_data(args)
    for index, arg in enumerate(args):
        if match := re.fullmatch(r"--recipe(?:=(.*))?", arg):
            name = match[1] or "".join(args[index + 1 : index + 2])
    if name not in recipes:
        raise UsageError(f"no recipe {name!r}; {nearest(name, recipes)}")
    return parsed(recipes[name], command_of(recipes[name], prog), args)


def command_of(recipe: type["Config"], prog: str) -> SettingsCommand:
    """Return the command of a task, with the defaults of a recipe in its help."""
    head = HEAD.of(prog=prog, about=cleandoc(recipe.__doc__ or ""))
    return SettingsCommand(
        recipe,
        prog,
        head,
        OTHER_SPELLINGS,
        Config,
        "Options of this task",
        hints=lambda: {theirs: f"type {ours}" for theirs, ours in INSTEAD.items()},
    )
