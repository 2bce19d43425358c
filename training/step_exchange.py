"""What ranks exchange in a step beside gradients: requests to stop or save, and times with them.

An exchange begins with a step and travels while that computes. It is read before the weights
change, so all ranks follow a request after the same step. Where a GPU computes, the host runs ahead
of it, and the exchange is read a step later, so that no host waits for the slowest message.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from rackrun.training.ranks import Ranks


class StepExchange:
    """The exchanges of all ranks, step by step."""

    def __init__(
        self, ranks: Ranks, pending: Callable[[], int], others: Callable[[], list[int]] = list
    ) -> None:
        """Exchange what `pending` returns: all ranks follow the strongest request.

        `others` returns numbers that travel with it; all ranks learn the largest of each.
        """
        self._ranks, self._pending, self._others = ranks, pending, others
        self.largest: list[int] = []
        """The largest of the other numbers, by place; empty where none are due after the step."""
        self._numbers: torch.Tensor | None = None  # under way
        self._steps_left = 0
        self._agreed = 0

    def begin(self) -> None:
        """Begin a step. A request that arrives from now on waits for the next exchange."""
        self._agreed, self.largest = 0, []
        if self._ranks.world > 1 and self._numbers is None:
            self._numbers = torch.tensor([self._pending(), *self._others()])
            self._work = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, async_op=True)
            self._steps_left = int(self._ranks.device.type == "cuda")

    def complete(self) -> None:
        """Wait until all that this step needs is here."""
        if self._numbers is None:
            return
        if self._steps_left:
            self._steps_left -= 1
            return
        if self._work:
            self._work.wait()
        (self._agreed, *self.largest), self._numbers = self._numbers.tolist(), None

    @property
    def request(self) -> int:
        """The strongest request of all ranks that is due after the step, once it is complete."""
        return self._pending() if self._ranks.world == 1 else self._agreed
