"""Connections to one server: kept alive, with limits on waiting.

http.client is the fastest: it reads directly into a given buffer (0.22 ms of CPU per MB over
loopback, like pycurl; urllib3 takes 0.27, httpx 0.8), and accepts a socket of another class.
"""

import contextlib
import http.client
import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

SLOWEST = 1000  # bytes per second; a server that stays below this counts as gone
IDLE = 16  # connections kept for the next request


@dataclass(frozen=True)
class Timeouts:
    """Limits on waiting for a server, in seconds."""

    connect_seconds: float = 5.0
    """For a connection."""
    stall_seconds: float = 30.0
    """For bytes, while fewer than 1 kB arrive in a second."""
    total_seconds: float = 120.0
    """For a block, including all retries."""
    first_seconds: float = 15.0
    """For the very first response: a wrong address should not look like a failing server."""


class _StallTimeout:
    """A socket that times out if the server sends too little for too long.

    Only the time spent waiting counts: a reader may pause between reads.
    """

    stall_seconds = 30.0
    deadline = float("inf")  # on the monotonic clock
    _waited = 0.0
    _got = 0

    def __del__(self) -> None:
        self.close()  # type: ignore[attr-defined]  # a pool and its connections may go in any order

    def recv_into(self, *buffer: Any) -> int:
        """Receive; raise TimeoutError when the server is too slow, or the deadline has passed."""
        begun = time.monotonic()
        count: int = super().recv_into(*buffer)  # type: ignore[misc]  # of the other base class
        now = time.monotonic()
        self._waited += now - begun
        self._got += count
        if self._got >= SLOWEST * self.stall_seconds:
            self._waited, self._got = 0.0, 0
        elif self._waited > self.stall_seconds:
            raise TimeoutError(f"under {SLOWEST} bytes/s for {self.stall_seconds:g} s")
        if now > self.deadline:
            raise TimeoutError("the time for this block is up")
        return count


class _TimedSocket(_StallTimeout, socket.socket):
    pass


class _TimedTLSSocket(_StallTimeout, ssl.SSLSocket):
    pass


class Connection(http.client.HTTPConnection):
    """One connection to the server."""

    def __init__(
        self, host: str, port: int, context: ssl.SSLContext | None, timeouts: Timeouts
    ) -> None:
        super().__init__(host, port)
        self._context = context
        self._timeouts = timeouts
        self._timed: _TimedSocket | _TimedTLSSocket | None = None
        if context:
            self.default_port = http.client.HTTPS_PORT

    def connect(self) -> None:
        """Connect a socket with these limits."""
        seconds = self._timeouts.connect_seconds
        plain = socket.create_connection((self.host, self.port), seconds)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        family, kind = plain.family, plain.type
        timed: _TimedSocket | _TimedTLSSocket
        timed = _TimedSocket(family, kind, fileno=plain.detach())
        timed.settimeout(seconds)
        if self._context:
            wrapped = self._context.wrap_socket(timed, server_hostname=self.host)
            assert isinstance(wrapped, _TimedTLSSocket)
            timed = wrapped
        timed.stall_seconds = self._timeouts.stall_seconds
        self.sock = self._timed = timed

    def wait_until(self, deadline: float) -> None:
        """Set the deadline of all following reads, on the monotonic clock."""
        seconds = min(self._timeouts.stall_seconds, max(deadline - time.monotonic(), 0.01))
        if self._timed:  # not `sock`: that is gone after a `Connection: close`
            self._timed.settimeout(seconds)
            self._timed.deadline = deadline


class Pool:
    """The connections of one process to one server; any thread may take and give."""

    def __init__(
        self, host: str, port: int, context: ssl.SSLContext | None, timeouts: Timeouts
    ) -> None:
        if context:
            context.sslsocket_class = _TimedTLSSocket  # what wrap_socket makes
        self._arguments = (host, port, context, timeouts)
        # One too many pushes out the oldest, whose socket closes as nothing refers to it any more.
        self._idle: deque[Connection] = deque(maxlen=IDLE)

    def take(self) -> Connection:
        """Return an idle connection, or a new one."""
        try:
            return self._idle.pop()  # the one used last is the least likely to be closed
        except IndexError:
            return Connection(*self._arguments)

    def give(self, connection: Connection) -> None:
        """Take back a connection whose response was read to the end."""
        self._idle.append(connection)

    def forget(self) -> None:
        """Close the idle connections."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._idle.pop().close()
