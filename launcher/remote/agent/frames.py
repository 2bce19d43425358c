"""The two streams between agent and launcher: orders come in, frames go out.

order    a length on a line, then that many bytes of JSON
frame    a header (kind, local rank, length), then that many bytes
"""

from __future__ import annotations

import io
import json
import os
import select
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

from rackrun.launcher.remote.processes import KILL_SECONDS

HEADER = struct.Struct(">BHI")
"""A frame's kind, local rank and payload length."""

EVENT, OUT, ERR, REPORT = 0, 1, 2, 3
"""Kinds of frames: an event, bytes of standard output and error, a rank's report as it came."""

NO_RANK = 0xFFFF
"""The local rank of a frame that belongs to no rank: torchrun's output, the host's events."""

READ_BYTES = 1 << 16
REPORT_BYTES = 1 << 14  # longer reports are dropped
USAGE_SECONDS = 3.0  # or a third of a short heartbeat timeout: it is also the agent's sign of life
BACKLOG_BYTES = 1 << 20  # output that waits for the launcher; more stays in the ranks' pipes


class Launcher:
    """The agent's connection to the launcher; neither of its streams ever blocks."""

    def __init__(self) -> None:
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self.heard_at = time.monotonic()
        self.is_gone = False
        self.stall_seconds = KILL_SECONDS
        self.waiting = bytearray()  # for room in the stream
        stdin: io.BufferedReader = sys.stdin.buffer  # type: ignore[assignment]
        self.arrived = bytearray(stdin.peek())  # read ahead together with the first order

    @property
    def full(self) -> bool:
        """Return True when too much waits for the launcher to read more from the ranks."""
        return len(self.waiting) > BACKLOG_BYTES

    def send_event(self, local: int = NO_RANK, **event: Any) -> None:
        """Send an event."""
        self.send(EVENT, local, json.dumps(event).encode())

    def send(self, kind: int, local: int, payload: bytes) -> None:
        """Send one frame, as soon as there is room for it."""
        if not self.is_gone:
            self.waiting += HEADER.pack(kind, local, len(payload)) + payload
            self.flush()

    def flush(self) -> None:
        """Write what the launcher takes now."""
        try:
            while self.waiting:
                del self.waiting[: os.write(1, self.waiting)]
        except BlockingIOError:
            pass
        except OSError:  # no reader is left: the run is over, even if standard input is still open
            self.is_gone = True
            self.waiting.clear()

    def flush_all(self) -> None:
        """Write all that waits, unless the launcher takes nothing for too long."""
        while self.waiting and select.select([], [1], [], self.stall_seconds)[1]:
            self.flush()

    def orders(self) -> Iterator[dict[str, Any]]:
        """Yield the orders that have arrived."""
        try:
            data = read_some(0)
        except OSError:
            data = b""
        if data:
            self.heard_at = time.monotonic()
            self.arrived += data
        self.is_gone = self.is_gone or data == b""
        while b"\n" in self.arrived:
            head, _, rest = self.arrived.partition(b"\n")
            if len(rest) < int(head):
                return
            self.arrived = rest[int(head) :]
            yield json.loads(bytes(rest[: int(head)]))


def read_some(descriptor: int) -> bytes | None:
    """Return the bytes that can be read now; None for none yet, b"" at the end."""
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return None
