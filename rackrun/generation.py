"""The groups of an elastic run over time, as its result and its report have them."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from rackrun.light_dataclass import dataclass
from rackrun.shapes import AtMost, Between

MOST_SHOWN = 1 << 16
"""Generations of a run that are kept."""

Count: TypeAlias = Annotated[int, Between(0, 2**53)]
Seconds: TypeAlias = Annotated[float, Between(0, 1e10)]
Texts: TypeAlias = Annotated[tuple[Annotated[str, AtMost(4096)], ...], AtMost(1 << 12)]


@dataclass(frozen=True)
class Generation:
    """A group of ranks that trained together, and why it was formed."""

    number: Count
    ranks: Count
    hosts: Count
    seconds: Seconds
    """Since the start of the run, when it was announced."""
    lost: Texts = ()
    """Who was lost before it, at which step, and why."""
    joined: Texts = ()
    """The ranks that joined, host by host."""
    step: Count | None = None
    """The last step of the state that it began with; None: it was not formed."""
    regroup_seconds: Seconds | None = None
    """From its announcement until the last member was in."""
