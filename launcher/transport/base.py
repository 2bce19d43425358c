"""The few verbs that every way to a host has, whether it is this machine or one behind SSH.

The supervisor gets places and never asks of which kind they are. To look after processes that an
agent left behind (it was killed, its link broke), the supervisor opens a second agent at the same
place, whose only order is to end them: so there is no verb for that here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Channel(Protocol):
    """A program that was started at a place: bytes to it and bytes from it."""

    def send(self, data: bytes) -> None:
        """Write all of `data` to its standard input; wait about a second for room at most.

        Raises HostLost when the channel takes nothing any more. The opening message (some 50 kB)
        is sent by the host's own thread, heartbeats by a thread that serves all hosts.
        """

    def receive(self, seconds: float | None = None) -> bytes:
        """Wait for standard output and return what is there, up to 256 KiB; b"" at the end.

        A broken link is an end like any other; `complaint` then says what broke. Raises
        TimeoutError when there was nothing for so many seconds; None: waits for ever.
        """

    def complaint(self) -> str:
        """What it wrote to standard error, and what broke: the last 4 KiB, for an error message."""

    def close(self) -> None:
        """Close both directions, so that the agent sees end-of-file; wakes a waiting `receive`.

        Called by any thread, any number of times; raises nothing.
        """


class Transport(Protocol):
    """A machine on which the launcher can start a program."""

    @property
    def name(self) -> str:
        """What the user calls it; for messages and for log folders."""

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a program there, without a terminal; raise a Problem that names the host.

        Every step of it has a time limit. Called by the host's own thread, all hosts at once.
        `argv` is ours and fixed (see `wire.bootstrap`): nothing of the user's is in it.
        """
