"""Waiting in tests, for events that have no better way to be waited for."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(expected: Callable[[], T], what: str = "this happens", seconds: float = 240.0) -> T:
    """Return the first true value; AssertionError with `what` if there is none in time."""
    deadline, looked = time.monotonic() + seconds, time.thread_time()
    while not (value := expected()):
        assert time.monotonic() < deadline, f"after {seconds:g} s: {what}"
        # To look costs a tenth of a core, but what is seen for a second must not be missed.
        time.sleep(min(0.5, max(0.02, 9 * (time.thread_time() - looked))))
        looked = time.thread_time()
    return value
