"""No rank takes a step before every rank has read its first batch.

So a host that cannot read its data ends the run by its own error, with its own name, and not as a
peer that others wait for in the middle of their first step.
"""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import FrameType
from typing import TypeVar

from rackrun.errors import DataError
from training.ranks import Ranks

Item = TypeVar("Item")


def all_begun(batches: Iterator[Item], ranks: Ranks, seconds: float) -> Iterator[Item]:
    """The same batches, once every rank has its first one.

    DataError on the rank that has none after so many seconds; the others learn it from its end.
    """
    with _limit(seconds, "the first batch"):
        first = next(batches)
    ranks.all_reduce_max(0)
    return chain([first], batches)


@contextmanager
def _limit(seconds: float, what: str) -> Iterator[None]:
    """DataError when the block takes longer than that, wherever it waits."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise DataError(
            f"{socket.gethostname()}: {what} was not read within {seconds:g} s; look at the"
            " network and the server, or give it longer: --first-batch-seconds"
        )

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
