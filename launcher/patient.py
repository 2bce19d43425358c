"""A way to write that never waits: for a stopped terminal, or a reader that is slow."""

from __future__ import annotations

import os
import select
import stat
import time

CHUNK_BYTES = 4096  # what a pipe takes at once when poll says that it takes something
BACKLOG_BYTES = 1 << 22
STALL_SECONDS = 1.0


class Patient:
    """A text stream: what its descriptor does not take now stays for later, or is counted."""

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        """The descriptor stays as it is: others may share it."""
        self.descriptor = descriptor
        self.waiting = bytearray()
        self.dropped = 0
        """Lines that nobody took in time."""
        self.gone = False
        """Nobody will ever read this again."""
        self.took_at = time.monotonic()
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self.chunk = BACKLOG_BYTES if is_file else CHUNK_BYTES
        self.poll = select.poll()
        self.poll.register(descriptor, select.POLLOUT)

    def fileno(self) -> int:
        """The descriptor that is written to."""
        return self.descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self.descriptor)

    def write(self, text: str) -> int:
        """Take text; it is written with the next `flush`."""
        self.write_bytes(text.encode("utf-8", "replace"))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Take bytes, unless too many wait already and nothing has moved for a second."""
        if len(self.waiting) > BACKLOG_BYTES:
            self.flush_within(STALL_SECONDS - (time.monotonic() - self.took_at))
        if len(self.waiting) > BACKLOG_BYTES or self.gone:
            self.dropped += data.count(b"\n")
        else:
            self.waiting += data

    def flush(self) -> None:
        """Write what is taken now."""
        self.flush_within(0.0)

    def flush_within(self, seconds: float) -> None:
        """Write what waits, for that long at most."""
        deadline = time.monotonic() + seconds
        while self.waiting and not self.gone:
            milliseconds = max(0.0, deadline - time.monotonic()) * 1000
            if not self.poll.poll(min(milliseconds, 1e6)):
                return
            self._write_chunk()

    def _write_chunk(self) -> None:
        try:
            written = os.write(self.descriptor, self.waiting[: self.chunk])
        except OSError:  # a broken pipe, a terminal that was closed
            self.gone = True
            self.waiting.clear()
            return
        del self.waiting[:written]
        self.took_at = time.monotonic()
