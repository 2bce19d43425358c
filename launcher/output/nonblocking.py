"""A way to write that never waits: for a stopped terminal, or a reader that is slow."""

from __future__ import annotations

import os
import select
import stat
import threading
import time

CHUNK_BYTES = 1 << 16
SURE_BYTES = 4096  # what a pipe takes at once when poll reports that it is writable
FILE_BYTES = 1 << 18  # of what a file takes at once: more does not stay in the processor's cache
BACKLOG_BYTES = 1 << 22
STALL_SECONDS = 1.0

_LEFT = threading.Event()
"""The terminal is gone, and the run goes on without it."""


def nobody_reads() -> None:
    """Write nothing to a terminal or pipe from now on: that it has no reader ends no run."""
    _LEFT.set()
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a file goes on to be written
            os.dup2(null, descriptor)
    os.close(null)


class NonBlockingWriter:
    """A text stream: what its descriptor does not take now stays for later, or is counted.

    So a reader who is slower than 2 MB/s loses lines, and costs the writer a second now and then.
    """

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        """Leave the descriptor as it is: others may share it."""
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self.descriptor = descriptor if is_file else _nonblocking(descriptor)
        self.waiting = bytearray()
        self.dropped = 0
        """Lines that were not read in time."""
        self.is_file = is_file
        self.reader_left = False
        self.lagging = False
        """The reader was too slow; writes do not wait for it until it has caught up."""
        sure = CHUNK_BYTES if self.descriptor != descriptor else SURE_BYTES
        self.chunk = FILE_BYTES if is_file else sure
        self.poll = select.poll()
        self.poll.register(descriptor, select.POLLOUT)

    @property
    def closed(self) -> bool:
        """Return True once the reader has closed its end, and the run was not left by it."""
        return self.reader_left and not _LEFT.is_set()

    def fileno(self) -> int:
        """Return the descriptor that is written to."""
        return self.descriptor

    def isatty(self) -> bool:
        """Return True for a terminal."""
        return os.isatty(self.descriptor)

    def write(self, text: str) -> int:
        """Take text; it is written with the next `flush`."""
        self.write_bytes(text.encode("utf-8", "replace"))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Take bytes, unless too many still wait after a second."""
        if len(self.waiting) > BACKLOG_BYTES and not self.lagging:
            self.flush_within(STALL_SECONDS)
            self.lagging = len(self.waiting) > BACKLOG_BYTES // 2
        if _LEFT.is_set() and not self.is_file:
            self.waiting.clear()
        elif self.lagging or self.reader_left:
            self.dropped += data.count(b"\n")
        else:
            self.waiting += data

    def flush(self) -> None:
        """Write what is taken now."""
        self.flush_within(0.0)

    def flush_within(self, seconds: float) -> None:
        """Write what waits, for that long at most."""
        deadline = time.monotonic() + seconds
        while self.waiting and not self.reader_left:
            milliseconds = max(0.0, deadline - time.monotonic()) * 1000
            if not self.poll.poll(min(milliseconds, 1e6)) or not self._write_chunk():
                return

    def _write_chunk(self) -> int:
        written = 0
        try:
            with memoryview(self.waiting) as waiting:
                written = os.write(self.descriptor, waiting[: self.chunk])
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.reader_left = True
            self.waiting.clear()
        except OSError:  # a terminal that has hung up, of which a signal tells
            self.waiting.clear()
        del self.waiting[:written]
        self.lagging = self.lagging and bool(self.waiting)
        return written


def _nonblocking(descriptor: int) -> int:
    # poll alone is not enough: for a terminal it promises room for a byte, not for more. O_NONBLOCK
    # on the descriptor itself would change it for all programs that share the terminal.
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError:  # a socket, or another user's terminal
        return descriptor
