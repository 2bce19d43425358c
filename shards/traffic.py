"""Count what a rank's processes read, by where it came from, and note which hosts send wrong bytes.

The counters are the kernel's (eventfd): adding is atomic, needs no lock that a killed loader worker
could keep, and reading resets. A pipe takes the ranks of those hosts in the same way.
"""

import contextlib
import os
import struct
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal, NamedTuple

Origin = Literal["cache", "peers", "origin"]


class ReadBytes(NamedTuple):
    """Bytes that were read from the host's own cache, from other hosts, and from --data."""

    cache: int = 0
    peers: int = 0
    origin: int = 0

    def plus(self, other: "ReadBytes") -> "ReadBytes":
        """Return the sums."""
        return ReadBytes(*map(sum, zip(self, other, strict=True)))


COUNTERS = len(ReadBytes._fields)
MOST_LIARS = 64  # in one report
_RANK = struct.Struct("<I")


class Traffic:
    """The counters of a source, in this process and those that it was sent to."""

    def __init__(self, descriptors: Sequence[int] = ()) -> None:
        # Those of the counters, and of both ends of a pipe.
        self.descriptors = tuple(descriptors) or _new_descriptors()
        self._total = ReadBytes()
        self._liars = set[int]()

    def add(self, origin: Origin, count: int) -> None:
        """Count bytes from there."""
        if count:  # a write of zero is an event, too
            os.eventfd_write(self.descriptors[ReadBytes._fields.index(origin)], count)

    def total(self) -> ReadBytes:
        """Return all that was counted so far; one thread of one process may ask."""
        self._total = self._total.plus(ReadBytes(*map(_taken, self.descriptors[:COUNTERS])))
        return self._total

    def blame(self, rank: int) -> None:
        """Note that the host of this rank, its first one, has sent wrong bytes."""
        with contextlib.suppress(BlockingIOError):  # of so many, one more is no news
            os.write(self.descriptors[-1], _RANK.pack(rank))

    def liars(self) -> set[int]:
        """Return the first ranks of hosts that have sent wrong bytes; ask as for the total."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.descriptors[-2], _RANK.size * MOST_LIARS)
            self._liars.update(rank for (rank,) in _RANK.iter_unpack(data))
        return self._liars

    def shared(self) -> Any:
        """Return what a process that is being started inherits; None for any other pickle."""
        if not get_spawning_popen():
            return None
        from multiprocessing.reduction import DupFd

        return [DupFd(descriptor) for descriptor in self.descriptors]

    def inherit(self, shared: Any) -> None:
        """Count into the counters of the parent process from now on."""
        self._close()
        self.descriptors = tuple(duplicate.detach() for duplicate in shared)

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _new_descriptors() -> tuple[int, ...]:
    counters = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(COUNTERS))
    return (*counters, *os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))


def _taken(descriptor: int) -> int:
    try:
        return os.eventfd_read(descriptor)  # which resets it
    except BlockingIOError:
        return 0
