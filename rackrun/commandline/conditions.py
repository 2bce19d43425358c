"""When options have an effect; those that are given without one are refused.

A setting that changes nothing looks like one that does: a sweep over --lr where only the last layer
trains, at --head-lr, ends with equal losses.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from rackrun.errors import UsageError


class Condition(NamedTuple):
    """What must be so for options to have an effect."""

    options: tuple[str, ...]
    applies: Callable[[Any], bool]
    """(settings) -> whether they have one; subclasses of settings have more fields, hence `Any`."""
    otherwise: str
    """Why not, with `config` to be formatted."""
    remedy: str = ""
    """What to type instead, if anything but leaving them out; formatted likewise."""

    def described(self, config: Any) -> str:
        """Return why an option has no effect with these settings, and what to type."""
        alternative = f", or type {self.remedy}" if self.remedy else ""
        return f"{self.otherwise}; leave it out{alternative}".format(config=config)


def changed_settings(config: Any) -> set[str]:
    """Return the settings that differ from their defaults."""
    return {field.name for field in fields(config) if getattr(config, field.name) != field.default}


def refuse_without_effect(
    config: Any, typed: Collection[str], conditions: Sequence[Condition]
) -> None:
    """Raise UsageError for settings among these that change nothing, each with what to type."""
    problems = [
        f"{as_typed(config, name)} has no effect: {condition.described(config)}"
        for condition in conditions
        for name in condition.options
        if name in typed and getattr(config, name)  # what is switched off asks for no effect
        if not condition.applies(config)
    ]
    if problems:
        raise UsageError("; ".join(problems))


def as_typed(config: Any, name: str) -> str:
    """Return a setting as an option with its value; of a repeatable one, with the first."""
    value = getattr(config, name)
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, tuple):
        value = value[0]
    return option if value is True else f"{option} {value}"
