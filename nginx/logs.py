"""nginx's logs: counted, and kept short, as they take memory and any client can lengthen them.

Those of a server that ends with us are truncated when they are long. Of one that outlives us, the
kernel lets a native nginx write no file beyond a limit, and Docker rotates. Clients choose most of
what is in a line of the access log: paths, ranges and methods may hold any byte.
"""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from rackrun.shapes import LARGEST_NUMBER, AtMost, Between, Misshapen, parsed

LOG_BYTES = 16 << 20  # an epoch of ImageNet is 16 MB
FILE_BYTES = 4 * LOG_BYTES  # beyond this the kernel lets a native nginx write no more
CHECK_SECONDS = 1.0
LINE_BYTES = 1 << 17  # more than nginx can write: three fields of 8 KiB, each byte as six
MOST_CLIENTS = 1 << 16  # are counted; more addresses than that are not those of training hosts


class Logs:
    """The logs of a server, truncated while it runs whenever they are long."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def keep_short(self) -> None:
        """Start a thread that truncates long logs, until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; a second call does no harm."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(CHECK_SECONDS):
            for path in self.paths:
                if path.exists() and path.stat().st_size > LOG_BYTES:
                    os.truncate(path, 0)  # nginx appends, so it goes on at the beginning


@dataclass(frozen=True)
class LoggedRequest:
    """A line of the access log, in the format of nginx.conf.template."""

    time: str
    client: Annotated[str, AtMost(45)]  # the longest address
    method: str
    path: str
    range: str
    status: Annotated[str, AtMost(3)]
    bytes: Annotated[int, Between(0, LARGEST_NUMBER)]
    seconds: Annotated[float, Between(0, LARGEST_NUMBER)]


def request_of(line: bytes) -> LoggedRequest:
    """Parse a line; raise Misshapen for one that is none."""
    return parsed(line.decode(errors="replace"), LoggedRequest, LINE_BYTES)


@dataclass
class ServerTraffic:
    """Counts of an access log, read as it grows."""

    log: Path
    requests: int = 0
    bytes: int = 0
    clients: set[str] = field(default_factory=set)
    _read: int = 0  # bytes of the log that are counted

    def update(self) -> None:
        """Count the lines that have been added since the last time; a log may begin anew."""
        with self.log.open("rb") as log:
            if log.seek(0, 2) < self._read:
                self._read = 0
            log.seek(self._read)
            while len(line := log.readline(LINE_BYTES)) == LINE_BYTES or line.endswith(b"\n"):
                self._read += len(line)
                self.requests += 1
                with suppress(Misshapen):  # a request, of which nothing else is known
                    request = request_of(line)
                    self.bytes += request.bytes
                    if len(self.clients) < MOST_CLIENTS:
                        self.clients.add(request.client)
