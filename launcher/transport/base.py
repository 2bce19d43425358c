"""The interface of every way to start programs on a host, be it this machine or one over SSH.

    channel = transport.open(bootstrap(python))
    channel.send(program + order)           frames and answers come back:
    while data := channel.receive():        b"" is the end, however it came
        ...

The supervisor gets transports and does not know of which kind they are. To clean up after an agent
that was killed or whose connection broke, it opens a second agent over the same transport, which is
ordered to end the first one's processes: so there is no method for that here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Channel(Protocol):
    """A program that was started on a host: bytes to it and bytes from it."""

    def send(self, data: bytes) -> None:
        """Write all of `data` to its standard input, waiting for room for about a second at most.

        Raises HostLost when the channel is closed or has no room. The opening message (some 50 kB)
        is sent by the host's own thread, heartbeats by a thread that serves all hosts.
        """

    def receive(self, seconds: float | None = None) -> bytes:
        """Wait for standard output and return what is there, up to 256 KiB; b"" at the end.

        A broken connection is an end like any other; `complaint` then describes it. Raises
        TimeoutError when nothing came for `seconds`; None waits without limit.
        """

    def is_unread(self) -> bool:
        """Return whether bytes, or the end, have arrived that no `receive` has returned yet."""

    def complaint(self) -> str:
        """Return the last 4 KiB of its standard error, and what broke, for an error message."""

    def close(self) -> None:
        """Close both directions, so that the agent sees end-of-file; wakes a waiting `receive`.

        Called by any thread, any number of times; raises nothing.
        """


class Transport(Protocol):
    """A machine on which the launcher can start a program."""

    @property
    def name(self) -> str:
        """Return the name that the user gave it, for messages and log folders."""

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a program there, without a terminal; raise a Problem that names the host.

        Every step of it has a time limit. Called by the host's own thread, all hosts at once.
        `argv` is fixed (see `bootstrap`): nothing in it comes from the user.
        """
