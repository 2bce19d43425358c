"""Count what a rank's processes read, by where it came from.

The counters are the kernel's (eventfd): adding is atomic, needs no lock that a killed loader worker
could keep, and reading resets.
"""

import contextlib
import os
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


class Traffic:
    """The counters of a source, in this process and those that it was sent to."""

    def __init__(self, descriptors: Sequence[int] = ()) -> None:
        self.descriptors = tuple(descriptors) or _new_descriptors()
        self._total = ReadBytes()

    def add(self, origin: Origin, count: int) -> None:
        """Count bytes from there."""
        if count:  # a write of zero is an event, too
            os.eventfd_write(self.descriptors[ReadBytes._fields.index(origin)], count)

    def total(self) -> ReadBytes:
        """Return all that was counted so far; one thread of one process may ask."""
        self._total = self._total.plus(ReadBytes(*map(_taken, self.descriptors)))
        return self._total

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
    return tuple(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in ReadBytes._fields)


def _taken(descriptor: int) -> int:
    try:
        return os.eventfd_read(descriptor)  # which resets it
    except BlockingIOError:
        return 0
