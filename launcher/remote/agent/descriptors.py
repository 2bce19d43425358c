"""Pipes and sockets that do not block."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    import socket

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
