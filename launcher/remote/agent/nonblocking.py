"""Pipes and sockets that do not block: the agent has one thread, and every rank needs it."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import socket
from collections.abc import Callable

READ_BYTES = 1 << 16


def read_some(descriptor: int) -> bytes | None:
    """Return the bytes that can be read now; None for none yet, b"" at the end."""
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return None


def receive(connection: socket.socket) -> bytes | None:
    """Return the next message; None when there is none yet, b"" when the other side is gone."""
    try:
        return connection.recv(READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class LocalSocket:
    """A Unix socket for processes of this host, and the connections to it.

    It preserves message boundaries (SOCK_SEQPACKET). `take` gets each connection with a message of
    it; `lost` gets each connection that has ended.
    """

    def __init__(
        self, take: Callable[[socket.socket, bytes], None], lost: Callable[[socket.socket], None]
    ) -> None:
        self.take = take
        self.lost = lost
        self.connections: set[socket.socket] = set()

    def open(self, selector: selectors.BaseSelector, path: str, processes: int) -> None:
        """Listen at this path, for so many processes that may call at once."""
        self.selector = selector
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(processes)
        self.listener.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ, self.accept)

    def accept(self, descriptor: int = 0) -> None:
        """Watch the connections of new callers, and take what they have sent already."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self.listener.accept()
                connection.setblocking(False)
                self.connections.add(connection)
                read = functools.partial(self.read, connection)
                self.selector.register(connection, selectors.EVENT_READ, read)
                self.read(connection)

    def read(self, connection: socket.socket, descriptor: int = 0) -> None:
        """Take all messages that have arrived, and the end."""
        data = receive(connection)
        while data:
            self.take(connection, data)
            data = receive(connection)
        if data == b"":
            self.close(connection)

    def close(self, connection: socket.socket) -> None:
        """Close a connection, and report it as lost, unless it is closed already."""
        if connection in self.connections:
            self.connections.remove(connection)
            self.selector.unregister(connection)
            connection.close()
            self.lost(connection)
