"""Requests that reach a rank between two steps: to save, or to stop.

A signal arrives at one rank, or at each at another moment, and a clock differs from rank to rank.
So the ranks exchange their requests during every step, and all of them follow the strongest one.
"""

import signal
import time
from types import FrameType, TracebackType

from rackrun.signals import handle, restore

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
