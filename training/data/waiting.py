"""How long a rank waits for its data: limited for the first batch, reported for each later one.

Take no step on any rank before every rank has read its first batch. A host that cannot read its
data then ends the run with its own error and its own name, rather than as a peer that others wait
for in the middle of their first step.

Later a server may be away for as long as its client has patience (shards.http.connection): a rank
that waits for a batch reports that, and is not taken for one that hangs.
"""

import signal
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, TypeVar

from rackrun.contract import phases
from rackrun.errors import DataError
from training.ranks import Ranks

Item = TypeVar("Item")
REPORTED_SECONDS = 5.0  # of waiting


class Reporting(Protocol):
    """What reports the phases of this rank."""

    @property
    def current_phase(self) -> str:
        """Return the phase that was reported last."""

    def phase(self, name: str) -> None:
        """Report that another phase begins."""


def first_batch(batches: Iterator[Item], ranks: Ranks, seconds: float) -> Item:
    """Return this rank's first batch, once every rank has its own.

    A rank that has none after `seconds` raises DataError, which ends the others, too.
    """

    def give_up() -> None:
        raise DataError(
            f"{socket.gethostname()}: the first batch was not read within {seconds:g} s; look at"
            " the network and the server, or give it longer: --first-batch-seconds"
        )

    with _on_alarm(give_up), _alarm_after(seconds):
        first = next(batches)
    ranks.all_reduce_max(0)
    return first


def waits_reported(
    first: Item,
    batches: Iterator[Item],
    progress: Reporting,
    seconds: float = REPORTED_SECONDS,
) -> Generator[Item]:
    """Yield all batches; report the phase "data" while one is late, and then the one before.

    The report comes from the loop's own thread, by a signal: it is a sign of life.
    """
    interrupted: list[str] = []

    def late() -> None:
        interrupted.append(progress.current_phase)
        progress.phase(phases.DATA)

    yield first
    while True:
        # No handler stays across a yield: an iterator that Ctrl-C leaves behind may be closed by
        # any thread, and only the main thread may restore one.
        with _on_alarm(late), _alarm_after(seconds):
            batch = next(batches, None)
        if interrupted:
            progress.phase(interrupted.pop())
        if batch is None:
            return
        yield batch


@contextmanager
def _on_alarm(ring: Callable[[], object]) -> Iterator[None]:
    """Call `ring` at each alarm, wherever the block is."""

    def rung(number: int, frame: FrameType | None) -> None:
        ring()

    before = signal.signal(signal.SIGALRM, rung)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _alarm_after(seconds: float) -> Iterator[None]:
    """Raise an alarm if the block takes longer than that."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
