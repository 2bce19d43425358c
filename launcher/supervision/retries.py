"""When ranks of an elastic run start again after they were lost. Pure.

A first loss says little: the rank starts again at once. One that is lost again before it has
trained for a while may never train: the more often in a row, the longer it waits. So a host that
fails at each start is tried a dozen times a day, and one that was only unlucky (a switch that
restarts, a disk that hangs for a minute) returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

LASTING_STEPS = 20
"""After this many steps with the others, a loss is a first one again."""
PAUSE_SECONDS = 30.0
"""After the second loss in a row; twice as long after each further one."""


class Retries:
    """The losses of each rank in a row."""

    def __init__(self) -> None:
        self._joined_at: dict[int, int] = {}
        """The step at which a rank of the group has joined it."""
        self._losses: Counter[int] = Counter()

    def join(self, ranks: Iterable[int], step: int) -> None:
        """Take note of the ranks that are in the group now; some may have been there before."""
        for rank in ranks:
            self._joined_at.setdefault(rank, step)

    def leave(self, ranks: Iterable[int]) -> None:
        """Take note of ranks that have been sent away, which is no loss."""
        for rank in ranks:
            self._joined_at.pop(rank, None)

    def lose(self, ranks: Iterable[int], step: int) -> None:
        """Count the loss of ranks, of the group or on their way there."""
        for rank in ranks:
            joined_at = self._joined_at.pop(rank, step)
            has_lasted = step - joined_at >= LASTING_STEPS
            self._losses[rank] = 1 if has_lasted else self._losses[rank] + 1

    def pause_seconds(self, ranks: Iterable[int]) -> float:
        """Return for how long these ranks, of one host, are not to start again."""
        in_a_row = max((self._losses[rank] for rank in ranks), default=0)
        return PAUSE_SECONDS * 2 ** (in_a_row - 2) if in_a_row > 1 else 0.0
