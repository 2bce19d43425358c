"""Wishes that reach a rank from outside between two steps: to save, or to end.

A signal arrives at one rank, or at each at another moment, and a clock differs from rank to rank.
So the ranks exchange their wishes after every step, and the strongest one is granted on all.
"""

import signal
import time
from types import FrameType, TracebackType

NOTHING = 0
SAVE = 1  # any larger wish is the number of the signal that asks to end: SIGINT 2, SIGTERM 15


class StopRequests:
    """What this rank wishes: noted by signal handlers and a clock, asked for after every step.

    The second Ctrl-C is Python's own KeyboardInterrupt again: it does not wait for the step.
    """

    def __init__(self, save_minutes: float) -> None:
        self.ending = NOTHING
        self._save_seconds = save_minutes * 60
        self._saved = time.monotonic()

    @property
    def pending(self) -> int:
        """The strongest wish of this rank now."""
        overdue = 0 < self._save_seconds <= time.monotonic() - self._saved
        return self.ending or (SAVE if overdue else NOTHING)

    def acknowledge(self) -> None:
        """Start the clock of the next checkpoint."""
        self._saved = time.monotonic()

    def __enter__(self) -> "StopRequests":
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.ending = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
