"""The line between two nodes of a run: JSON objects, a line each, in both directions."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from rackrun.shapes import Misshapen, parsed

LINE_BYTES = 1 << 16
UNACKNOWLEDGED_MILLISECONDS = 15000


class PeerConnection:
    """JSON objects, a line each, in both directions."""

    def __init__(self, stream: socket.socket, most_bytes: int = LINE_BYTES) -> None:
        """Have the kernel notice a dead peer; no line is longer than `most_bytes`."""
        self.stream = stream
        self.most_bytes = most_bytes
        self._lines = stream.makefile("rb")
        keep_alive(stream)

    def send(self, **fields: Any) -> None:
        """Send one object; a lost connection is noticed by the receiver."""
        with contextlib.suppress(OSError):
            self.stream.sendall(json.dumps(fields).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next object, None at the end; raise Misshapen for nonsense.

        Raises TimeoutError where the other side is silent for `seconds`.
        """
        try:
            self.stream.settimeout(seconds)
            line = self._lines.readline(self.most_bytes + 1)
        except (OSError, ValueError) as error:  # reset, given up by the kernel, closed by ourselves
            if seconds is not None and isinstance(error, TimeoutError):
                raise
            return None
        if len(line) > self.most_bytes:
            raise Misshapen(f"a line of more than {self.most_bytes} bytes")
        return parsed(line, dict[str, Any], self.most_bytes) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Close both directions, which wakes a blocked receiver."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self.stream.close()


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other side is silent; send small things at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # These names are Linux's; a launcher elsewhere imports this module, and connects by SSH alone.
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 3),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    # Keepalive probes are not sent while data waits for an acknowledgement: this covers the rest.
    milliseconds = UNACKNOWLEDGED_MILLISECONDS
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
