"""Requests that reach a rank between two steps: to save, or to stop.

A signal arrives at one rank, or at each at another moment, and a clock differs from rank to rank.
So the ranks exchange their requests during every step, and all of them follow the strongest one.

An exchange begins with a step and travels while that computes. It is read before the weights
change, so all ranks follow a request after the same step. Where a GPU computes, the host runs ahead
of it, and the exchange is read a step later, so that no host waits for the slowest message.
"""

import signal
import time
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from rackrun.signals import handle, restore
from rackrun.training.ranks import Ranks

NOTHING = 0
SAVE = 2
STOP = 128  # more is the exit code of the signal that asks to stop: 130 for SIGINT, 143 for SIGTERM


class StopRequests:
    """The requests to this rank: from signal handlers and a clock, read before every step.

    The second Ctrl-C is Python's own KeyboardInterrupt again: it does not wait for the step.
    """

    def __init__(self, save_minutes: float) -> None:
        self.ending = NOTHING
        self._save_seconds = save_minutes * 60
        self._saved = time.monotonic()

    @property
    def pending(self) -> int:
        """Return the strongest request to this rank now."""
        overdue = 0 < self._save_seconds <= time.monotonic() - self._saved
        return self.ending or (SAVE if overdue else NOTHING)

    def acknowledge(self) -> None:
        """Start the clock for the next checkpoint."""
        self._saved = time.monotonic()

    def __enter__(self) -> "StopRequests":
        self._before = handle((signal.SIGINT, signal.SIGTERM), self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        restore(self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.ending = STOP + number
        handle((signal.SIGINT,), signal.default_int_handler)


class StepExchange:
    """The exchanges of all ranks, step by step: all of them follow the strongest request."""

    def __init__(self, ranks: Ranks, requests: StopRequests) -> None:
        self._ranks, self._requests = ranks, requests
        self._number: torch.Tensor | None = None  # under way
        self._steps_left = 0
        self._agreed = NOTHING

    def begin(self) -> None:
        """Begin a step. A request that arrives from now on waits for the next exchange."""
        self._agreed = NOTHING
        if self._ranks.world > 1 and self._number is None:
            self._number = torch.tensor(self._requests.pending)
            self._work = dist.all_reduce(self._number, dist.ReduceOp.MAX, async_op=True)
            self._steps_left = int(self._ranks.device.type == "cuda")

    def complete(self) -> None:
        """Wait until all that this step needs is here."""
        if self._number is None:
            return
        if self._steps_left:
            self._steps_left -= 1
            return
        if self._work:
            self._work.wait()
        self._agreed, self._number = int(self._number), None

    @property
    def request(self) -> int:
        """The strongest request of all ranks that is due after the step, once it is complete."""
        return self._requests.pending if self._ranks.world == 1 else self._agreed

    def agreed_now(self) -> int:
        """Return the strongest request of all ranks, which ask at the same point of the run."""
        return self._ranks.all_reduce_max(self._requests.pending)
