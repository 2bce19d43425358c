"""A time limit for work that may never end, such as reading from a file server that is gone."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return what some work returns; raise TimeoutError when that takes too long.

    A thread does it: a signal interrupts neither a dead file server nor a slow name server.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(errno.ETIMEDOUT, "takes too long")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
