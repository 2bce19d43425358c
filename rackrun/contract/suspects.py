"""Labels that a trained model doubts: training judges them, and `rackrun doctor` shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class SuspectLabel(NamedTuple):
    """An image whose label is probably wrong."""

    split: str
    shard: str
    key: str
    likely: str
    """The class that it looks like."""
    score: float
    """Probability of that class less that of the label, 0 to 1."""


class Question(NamedTuple):
    """Which images a model is to judge."""

    weights: str
    """The run folder, final.pt or checkpoint."""
    data: str
    """Folder or URL of shards."""
    model: str
    """The user's own model, as for `predict`; empty for one that the weights name."""
    task: str
    """The user's own task, likewise."""
    workers: int
    """Processes that read and decode; 0: one per core."""
    advance: Callable[[int], None]
    """Called with the number of images that have been judged since."""


class FindSuspects(Protocol):
    """How training is asked."""

    def __call__(self, question: Question, /) -> list[SuspectLabel]:
        """Return the labels that the model doubts."""
        ...
