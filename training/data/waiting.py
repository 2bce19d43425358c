"""Take no step on any rank before every rank has read its first batch.

A host that cannot read its data then ends the run with its own error and its own name, rather than
as a peer that others wait for in the middle of their first step.
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


def after_first_batch(batches: Iterator[Item], ranks: Ranks, seconds: float) -> Iterator[Item]:
    """Return the same batches, once every rank has its first one.

    A rank that has none after `seconds` raises DataError, which ends the others, too.
    """
    with _limit(seconds, "the first batch"):
        first = next(batches)
    ranks.all_reduce_max(0)
    return chain([first], batches)


@contextmanager
def _limit(seconds: float, what: str) -> Iterator[None]:
    """Raise DataError if the block takes longer than that, wherever it waits."""

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
