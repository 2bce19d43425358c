"""Optional waits: the first signal ends the wait, not the run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rackrun.signals import handle, restore

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_a_signal() -> Iterator[None]:
    """Let Ctrl-C, TERM or HUP raise KeyboardInterrupt in here, once; later ones are passed over.

    A signal that the parent process set to be ignored (`nohup`) stays ignored. In a thread of
    a user's program, signals are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            raise KeyboardInterrupt

    before = handle(HEARD, end)
    try:
        yield
    finally:
        restore(before)
