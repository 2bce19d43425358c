"""Contestants in turn: other work on the machine then slows all of them alike."""

import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def in_turn(rounds: int, contestants: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Run every contestant once a round; return their results by name.

    Every other round goes backwards, since a machine that grows warm or busy favors the first.
    """
    results: dict[str, list[T]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            sys.stderr.write(f"round {number + 1}: {name}\n")
            results[name].append(contestants[name]())
    return results
