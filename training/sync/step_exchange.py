"""What ranks exchange in a step beside gradients: requests, and times with them.

An exchange begins with a step, overlaps with it, and is read some steps later, so that no step
waits for it: among 64 ranks, a message of 1 ms becomes a sum after 126 of them, and a step of a GPU
takes a few. How many steps later is agreed in the exchange before, since all ranks must follow a
request after the same step: twice as many as any of them lately took. Where exchanges are complete
within their step, that is none.
"""

from collections import deque
from collections.abc import Callable

from rackrun.training.ranks import PendingMax, Ranks

RECENT = 32  # exchanges whose duration counts


class StepExchange:
    """The exchanges of a group of ranks, step by step."""

    def __init__(
        self, ranks: Ranks, pending: Callable[[], int], others: Callable[[], list[int]] = list
    ) -> None:
        """Exchange what `pending` returns: all ranks follow the strongest request.

        `others` returns numbers that travel with it; all ranks learn the largest of each.
        """
        self._ranks = ranks
        self._pending = pending
        self._others = others
        self.largest: list[int] = []
        """The largest of the other numbers, by place; empty where none are due after the step."""
        self._requests: PendingMax | None = None  # under way
        self._steps = 0  # since that began
        self._took: int | None = None  # of these, until it was complete on this rank
        self._lag = 0  # steps after which it is read, on all ranks
        self._durations = deque([0], RECENT)
        self._agreed = 0

    def begin(self) -> None:
        """Begin a step. A request that arrives from now on waits for the next exchange."""
        self._agreed, self.largest = 0, []
        if self._ranks.world > 1 and not self._requests:
            lag = 2 * max(self._durations)
            self._requests = self._ranks.all_reduce_max_later(self._pending(), lag, *self._others())
            self._steps, self._took = 0, None

    def complete(self) -> None:
        """Wait until all that this step needs is here."""
        if requests := self._requests:
            if self._took is None and requests.is_complete:
                self._took = self._steps
            # It has arrived by the time that it is due, and is seldom waited for.
            if self._steps == self._lag:
                self._durations.append(self._steps + 1 if self._took is None else self._took)
                (self._agreed, self._lag, *self.largest), self._requests = requests.wait(), None
            self._steps += 1

    @property
    def request(self) -> int:
        """The strongest request of all ranks that is due after the step, once it is complete."""
        return self._pending() if self._ranks.world == 1 else self._agreed
