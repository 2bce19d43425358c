"""Weights that no run has written, used as they are: by predict, evaluate and export."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rackrun.errors import UsageError
from rackrun.terminal import clean

OPTION = "--weights"


@dataclass(frozen=True)
class PublishedWeights:
    """Published weights."""

    weights: str = ""
    """A file of published weights, in place of a run; needs --model and --classes."""
    classes: str = ""
    """A text file with the class names of these weights, a line for each output of the model."""
    image_size: int = 0
    """Side of the square that their model sees, in pixels; 0: as published, else 224."""
    short_side: int = 0
    """Shorter side before the center crop, in pixels; 0: as published, else 256/224 of it."""
    mean: str = ""
    """Mean of their images, from 0 to 1, as in training; '': as published, else ImageNet's."""
    std: str = ""
    """Standard deviation of their images; with --mean."""

    def class_names(self) -> list[str]:
        """Return the names in the file; UsageError for no such file, and for a line without one."""
        try:
            names = Path(self.classes).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "no text in UTF-8"
            raise UsageError(f"--classes {self.classes}: {why}") from None
        names = [clean(name.strip()) for name in names]
        if not all(names) or len(set(names)) < len(names) or len(names) < 2:
            raise UsageError(
                f"--classes {self.classes}: not a different name in each of several lines"
            )
        return names

    def check(self, model: str) -> None:
        """Raise UsageError for options that miss one another."""
        if not self.weights and self != PublishedWeights():
            raise UsageError("--classes and what follows it in --help are for --weights FILE")
        if self.weights and not (model and self.classes):
            raise UsageError(
                f"--weights {self.weights}: type --model with the name of the model, and --classes"
                " with a file of its class names"
            )


def with_weights_first(args: Sequence[str]) -> list[str]:
    """Return arguments in which the file of --weights also stands where that of a run would."""
    for arg, following in pairwise((*args, "")):
        name, equals, value = arg.partition("=")
        if name == OPTION and (value or following):
            return [value if equals else following, *args]
    return [*args]
