"""A TCP proxy in front of an HTTP server that spoils answers as the tests wish.

Linux here has no netem: short bodies, stalls and resets in the middle come from this.
"""

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Answer:
    """An answer of the real server on its way to a client."""

    number: int  # of the request, counted from 0 over all connections
    request: bytes
    head: bytes  # with the empty line
    body: bytes
    client: socket.socket
    closing: threading.Event  # the proxy is being stopped

    def send(self, *, head: bytes | None = None, body: bytes | None = None) -> None:
        """Send it, or what is given instead of a part of it."""
        self.client.sendall(self.head if head is None else head)
        self.client.sendall(self.body if body is None else body)

    def hang_up(self) -> None:
        """Close the connection, orderly."""
        raise HangUp

    def reset(self) -> None:
        """Close the connection with a reset."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise HangUp

    def stall(self) -> None:
        """Send nothing more until the client has left or the proxy is stopped."""
        self.client.settimeout(0.05)
        while not self.closing.is_set():
            with contextlib.suppress(TimeoutError):
                if not self.client.recv(1, socket.MSG_PEEK):
                    break
                self.closing.wait(0.05)
        raise HangUp


class HangUp(Exception):
    """The connection has been spoilt and ends here."""


Fault = Callable[[Answer], None]


def pass_on(reply: Answer) -> None:
    """Change nothing."""
    reply.send()


class Proxy:
    """Listens on a free port; every answer goes through `fault`."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.fault: Fault = pass_on
        self.requests: list[bytes] = []
        self.bytes_sent = 0
        self._upstream = upstream
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._start(self._accept)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def stop(self) -> None:
        """Close everything; returns when every thread has ended."""
        self._closing.set()
        for connection in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        self._open.add(client)
        with client, contextlib.suppress(HangUp, OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with socket.create_connection(self._upstream) as server:
                self._relay(client, server)
        self._open.discard(client)

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        with client.makefile("rb") as requests, server.makefile("rb") as replies:
            while request := _head(requests):
                server.sendall(request)
                head = _head(replies)
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                body = replies.read(int(length[1])) if length else b""
                number = len(self.requests)
                self.requests.append(request)
                self.fault(Answer(number, request, head, body, client, self._closing))


def _head(stream: object) -> bytes:
    """Return the lines of a request or an answer up to the empty one."""
    lines = []
    while line := stream.readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""
