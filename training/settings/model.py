"""Which model predict, evaluate and export use: that of a run, or published weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from rackrun.commandline.options import Values
from rackrun.errors import UsageError

OPTION = "--weights"


@dataclass(frozen=True)
class ModelOptions:
    """Model and weights."""

    model: Annotated[str, Values("NAME")] = ""
    """The model that the weights were trained with, if it is your own: `my_models:Net`; or the
    model of --weights: resnet50, timm:NAME."""
    task: Annotated[str, Values("FILE")] = ""
    """The task that the weights were trained for, if it is your own: `./my_task.py`."""
    weights: Annotated[str, Values("FILE")] = ""
    """File of published weights, instead of a run; needs --model and --classes."""
    classes: Annotated[str, Values("FILE")] = ""
    """Text file with the class names of these weights, one line for each output of the model."""
    image_size: int = 0
    """Side of the square that the model sees, in pixels; 0: as published, or else 224."""
    short_side: int = 0
    """Shorter side before the center crop, in pixels; 0: as published, or else 256/224 of it."""
    mean: Annotated[str, Values("NUMBERS")] = ""
    """Mean to subtract from pixels, as in training; '': as published, or else ImageNet's."""
    std: Annotated[str, Values("NUMBERS")] = ""
    """Standard deviation to divide pixels by; with --mean."""

    def check(self) -> None:
        """Raise UsageError for options that lack others they need."""
        if not self.weights and replace(self, model="", task="") != ModelOptions():
            raise UsageError("--classes and the options after it in --help need --weights FILE")
        if "://" in self.weights:
            raise UsageError(f"--weights {self.weights}: download the file, and type its path")
        if self.weights and not (self.model and self.classes):
            raise UsageError(
                f"--weights {self.weights}: type --model with the name of the model, and --classes"
                " with a file of its class names"
            )
        if self.weights and not Path(self.weights).exists():
            raise UsageError(f"--weights {self.weights}: no such file")


def with_weights_first(args: Sequence[str]) -> list[str]:
    """Return arguments in which the file of --weights also stands where that of a run would."""
    for arg, following in pairwise((*args, "")):
        name, equals, value = arg.partition("=")
        if name == OPTION and (value or following):
            return [value if equals else following, *args]
    return [*args]
