"""The settings of a run in slices: a function takes the slice that it reads. Without torch."""

from dataclasses import dataclass
from typing import Literal

from rackrun.commandline.ranges import out_of_range

Switch = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Slice:
    """A part of the settings, whose numbers have ranges."""

    def problems(self) -> list[str]:
        """Return what contradicts itself or is out of range, a sentence each; slices add theirs."""
        return out_of_range(self)


def option(name: str) -> str:
    """Return a setting as users type it."""
    return f"--{name.replace('_', '-')}"
