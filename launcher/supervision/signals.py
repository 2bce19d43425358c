"""Signals to the launcher: recorded by handlers, processed by the supervisor in its next turn."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rackrun.signals import PASSED_ON_INT, is_ignored, restore

STOP_SIGNAL = signal.SIGUSR2  # what `./run-ssh stop` sends a launcher or a controller

TIME_LIMIT = signal.SIGALRM  # what the supervisor gives itself when --time-limit is reached
TAKE_IN = signal.SIGCONT  # the same at the end of an epoch, to go on with hosts that are back

_HANDLED = (
    *(signal.SIGINT, PASSED_ON_INT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, STOP_SIGNAL, signal.SIGTSTP),
)
_STAY_IGNORED = (signal.SIGINT, signal.SIGHUP)
"""Ignored here where our parent ignores them, as `nohup` and `trap '' INT` do, or we do already."""


class SignalQueue:
    """Signals that have arrived and are not processed yet."""

    def __init__(self) -> None:
        self._pending: deque[int] = deque()
        self.ask_for_end = False
        """One of them did, processed or not."""

    def add(self, number: int) -> None:
        """Add a signal that did not come through a handler of this process."""
        self._pending.append(number)
        self.ask_for_end = self.ask_for_end or number != signal.SIGTSTP

    def take(self) -> Iterator[int]:
        """Yield and remove the pending signals, in order of arrival."""
        while self._pending:
            yield self._pending.popleft()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals within this context; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python allows handlers in the main thread only; the program there has its own
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.add(signal.SIGINT if number == PASSED_ON_INT else number)

        ignored = {n for n in _STAY_IGNORED if is_ignored(n)}
        handled = [number for number in _HANDLED if number not in ignored]
        before = {number: signal.signal(number, note) for number in handled}
        try:
            yield
        finally:
            restore(before)
