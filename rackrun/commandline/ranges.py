"""The ranges of numbers in settings; each is on its field: `Annotated[int, Between(1)]`."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any

from rackrun.errors import UsageError
from rackrun.units import MOST_SECONDS

LARGEST_NUMBER = 2**53  # a float holds every whole number up to it


@dataclass(frozen=True)
class Between:
    """Numbers from `least` to `most`, both included; `description` replaces that in messages."""

    least: float
    most: float = LARGEST_NUMBER
    description: str = ""

    def __str__(self) -> str:
        """Return the range in words."""
        if self.description:
            return self.description
        is_open = self.most == LARGEST_NUMBER
        return f"{self.least} or more" if is_open else f"between {self.least} and {self.most}"


Count = Annotated[int, Between(0)]
Positive = Annotated[int, Between(1)]
Seconds = Annotated[float, Between(0, MOST_SECONDS, "between 0 s and a century")]
Share = Annotated[float, Between(0, 0.99)]
"""A fraction of something that must not vanish completely."""


@cache
def ranges(settings: type[Any]) -> Mapping[str, Between]:
    """Return the ranges on the fields of a settings class by name.

    A class that gives a field another default keeps the range of its base: `epochs: int = 90`.
    """
    by_name: dict[str, Between] = {}
    for base in reversed(settings.__mro__):
        for name, hint in inspect.get_annotations(base, eval_str=True).items():
            marks = getattr(hint, "__metadata__", ())  # of Annotated[int, ...]
            by_name.update((name, mark) for mark in marks if isinstance(mark, Between))
    return MappingProxyType(by_name)


def out_of_range(settings: Any) -> list[str]:
    """Return a sentence for each number that is not within the range of its field."""
    sentences = []
    for name, field in ranges(settings.__class__).items():
        value = getattr(settings, name)
        if not field.least <= value <= field.most:  # NaN is not, either
            # A whole number may be too long for a float, and for a line.
            shown = f"{value:g}" if abs(value) <= LARGEST_NUMBER else str(value)[:40]
            limits = "2^53 at most" if value > field.most == LARGEST_NUMBER else str(field)
            sentences.append(f"--{name.replace('_', '-')} {shown} is not {limits}")
    return sentences


def refuse_out_of_range(settings: Any) -> None:
    """Raise UsageError for numbers that are not within the ranges of their fields."""
    if sentences := out_of_range(settings):
        raise UsageError("; ".join(sentences))
