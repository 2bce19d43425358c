"""Totals of nginx's access log: requests, bytes, and the number of clients.

Clients choose most of what is in a line: paths, ranges and methods may hold any byte.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from rackrun.shapes import LARGEST_NUMBER, AtMost, Between, Misshapen, parsed

LINE_BYTES = 1 << 17  # more than nginx can write: three fields of 8 KiB, each byte as six
MOST_CLIENTS = 1 << 16  # are counted; more addresses than that are not those of training hosts


@dataclass(frozen=True)
class Request:
    """A line of the access log, in the format of nginx.conf.template."""

    time: str
    client: Annotated[str, AtMost(45)]  # the longest address
    method: str
    path: str
    range: str
    status: Annotated[str, AtMost(3)]
    bytes: Annotated[int, Between(0, LARGEST_NUMBER)]
    seconds: Annotated[float, Between(0, LARGEST_NUMBER)]


def request_of(line: bytes) -> Request:
    """Parse a line; raise Misshapen for one that is none."""
    return parsed(line.decode(errors="replace"), Request, LINE_BYTES)


@dataclass
class Traffic:
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
                    self._count(request_of(line))

    def _count(self, request: Request) -> None:
        self.bytes += request.bytes
        if len(self.clients) < MOST_CLIENTS:
            self.clients.add(request.client)
