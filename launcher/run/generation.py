"""The groups of an elastic run over time, as its result and its report have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Generation:
    """A group of ranks that trained together, and why it was formed."""

    number: int
    ranks: int
    hosts: int
    seconds: float
    """Since the start of the run, when it was announced."""
    lost: tuple[str, ...] = ()
    """Who was lost before it, and why."""
    joined: tuple[str, ...] = ()
    """The ranks that joined, host by host."""
    step: int | None = None
    """The last step of the state that it began with; None: it was not formed."""
    regroup_seconds: float | None = None
    """From its announcement until the last member was in."""
