"""rackrun models: what --model takes of the libraries, with size and published accuracy."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.errors import UsageError, install_command
from rackrun.tables import table
from rackrun.training.models.registered import TIMM, registered
from rackrun.user_code.sources import did_you_mean

Row = tuple[str, str, str, str]
HEAD = ("model", "parameters", "pixels", "top 1")


@dataclass(frozen=True)
class Models:
    """List the models of torchvision and timm that --model takes.

    For the weights that --weights imagenet loads, the table has the number of parameters, the side
    of the images, and the accuracy on ImageNet that torchvision publishes.
    """

    examples: ClassVar[Examples] = (
        ("{prog}", "all models"),
        ("{prog} resnet", "models with this text in their names"),
        ("{prog} 'timm:*vit*'", "models of timm that match a pattern"),
    )

    pattern: Positional[str] = ""
    """Part of a name, or a pattern with `*` and `?`."""


def main(args: Sequence[str]) -> int:
    """Print the models whose names match; return the exit code."""
    pattern = parse(Models, called("models"), args).pattern
    of_timm = [f"{TIMM}{name}" for name in registered("timm")]
    rows = [*_of_torchvision(pattern), *((name, "", "", "") for name in _named(of_timm, pattern))]
    if not rows:
        names = registered("torchvision")
        meant = did_you_mean(pattern, [*names, *of_timm])
        raise UsageError(f"{pattern}: no such model{meant}")
    sys.stdout.write(table(HEAD, rows, numbers=HEAD[1:]))
    if not of_timm:
        sys.stderr.write(f"for the models of timm, type: {install_command('timm')}\n")
    return 0


def _of_torchvision(pattern: str) -> Iterator[Row]:
    if not (names := _named(registered("torchvision"), pattern)):
        return  # without the seconds that an import takes
    from torchvision import models

    for name in names:
        weights = models.get_model_weights(name)
        described = weights["DEFAULT"].meta
        accuracy = described["_metrics"]["ImageNet-1K"]["acc@1"]
        side = weights["DEFAULT"].transforms.keywords["crop_size"]
        yield name, f"{described['num_params'] / 1e6:.1f} M", str(side), f"{accuracy:.1f}%"


def _named(names: Sequence[str], pattern: str) -> list[str]:
    is_pattern = any(character in pattern for character in "*?[")
    return [
        name
        for name in names
        if (fnmatchcase(name, pattern) if is_pattern else pattern.casefold() in name.casefold())
    ]
