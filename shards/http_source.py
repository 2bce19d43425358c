"""A shard folder on an HTTP server: ranges, asked for ahead, resumed where they break off.

    stream(shard), reads(ranges)    in order, several requested before the first is needed
      └── Fetch                     one range: requested, checked, resumed where it broke off

Whether bytes are right is told by digests and checksums alone. Reading ahead needs no threads: the
kernel receives meanwhile.
"""

from __future__ import annotations

import http.client
import os
import re
import ssl
import time
import urllib.parse
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from rackrun.commands import called
from rackrun.contract import variables
from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import UsageError
from rackrun.shard_folder import folder_and_version
from rackrun.shards.credentials import authorization, tls_context
from rackrun.shards.host_folder import Bytes, kept_index
from rackrun.shards.http_client import (
    EXAMPLE,
    REDIRECTS,
    TRANSIENT,
    TimedResponse,
    Transfer,
    Trouble,
    WrongResponse,
    checked,
    connected,
    header,
    shown,
)
from rackrun.shards.index import Shard, Split, largest_index
from rackrun.shards.source import BLOCK_BYTES, Range, Source, Stored
from rackrun.units import whole_number

AHEAD = 2  # ranges requested while the first of them is being used
PART_BYTES = 1 << 20  # at most so much is fetched twice if a response breaks off
PATH_LETTERS = "/%:@!$&'()*+,;=~"  # what a path may hold as it is (RFC 3986)
LONGEST_WISH = 10**9  # seconds that a server may ask us to wait
CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", re.ASCII)
HINTS = {
    401: f"; put user:password into a file and type: export {variables.CREDENTIALS}=FILE",
    403: f"; the server asks for a certificate? type: export {variables.CERTIFICATE}=FILE",
    404: "; is this the folder that the converter made, served whole?",
}

Connections = list[http.client.HTTPConnection]


@dataclass(frozen=True)
class Timeouts:
    """Limits on waiting for a server, in seconds."""

    connect_seconds: float = 5.0
    """Time to connect."""
    stall_seconds: float = 30.0
    """Time in which fewer than 1 kB per second may arrive."""
    total_seconds: float = 120.0
    """Time for a block, including all retries."""
    first_seconds: float = 15.0
    """Time for the manifest, which is read first: a wrong address should not look like a failing
    server."""


class HttpSource(Source):
    """A shard folder at an http(s):// URL."""

    def __init__(self, location: str, timeouts: Timeouts | None = None) -> None:
        folder, version = folder_and_version(location)
        self.folder = folder.rstrip("/") + "/"
        self.timeouts = timeouts or Timeouts()
        self.troubles = 0  # responses that were wrong, broke off or did not come
        self.url = checked(self.folder)
        if self.url.query:
            raise UsageError(f"{location}: not the URL of a folder, as in {EXAMPLE}")
        self.idle: Connections = []
        """Connections of this process that wait for a request."""
        self._process = os.getpid()
        weakref.finalize(self, close_all, self.idle)
        named = f"{self.folder}@{version}" if version else self.folder
        super().__init__(named, named, self.timeouts)

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Yield each range in turn, while the next ones are being fetched."""
        fetches = (
            Fetch(self, shard.name, offset, offset + length, shard.bytes)
            for shard, offset, length in ranges
        )
        return _in_turn(fetches)

    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return exactly `length` bytes of a shard from `offset` on."""
        return Fetch(self, shard.name, offset, offset + length, shard.bytes).finish()

    def index_data(self, part: Split, again: bool) -> Bytes:
        """Return the bytes of an index, which the processes of this host fetch once."""
        name, most_bytes = f"{part.index_sha256}.npy", largest_index(part.samples)
        return kept_index(name, lambda: self.read_file(part.index, most_bytes), again)

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return a file of unknown size; raise DataError if it is larger than allowed."""
        first = Fetch(self, name, 0, BLOCK_BYTES, most_bytes=most_bytes)
        block, total = first.finish(), first.total or 0
        rest = (
            Fetch(self, name, start, min(start + BLOCK_BYTES, total), total)
            for start in range(BLOCK_BYTES, total, BLOCK_BYTES)
        )
        return b"".join((block, *_in_turn(rest)))

    def path(self, name: str) -> str:
        """Return the path of a file, as a request has it."""
        return urllib.parse.quote(self.url.path, safe=PATH_LETTERS) + name

    @cached_property
    def headers(self) -> dict[str, str]:
        """The headers of every request: credentials, and no content encoding."""
        host, tls = self.url.hostname or "", self.url.scheme == "https"
        return {"Accept-Encoding": "identity", **authorization(host, tls)}

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return tls_context()

    def connection(self) -> http.client.HTTPConnection:
        """Return an idle connection, or a new one."""
        if self._process != os.getpid():  # a forked one leaves those to its parent
            self._process = os.getpid()
            close_all(self.idle)
        with suppress(IndexError):  # none is left; another thread may have taken the last one
            return self.idle.pop()  # used last, it is the least likely to be closed
        tls = self._tls if self.url.scheme == "https" else None
        return connected(self.url, self.timeouts.connect_seconds, tls)


def close_all(connections: Connections) -> None:
    """Close connections that wait for a request."""
    while connections:
        with suppress(IndexError):  # another thread has taken the last one
            connections.pop().close()


def _in_turn(fetches: Iterable[Fetch]) -> Iterator[Stored]:
    """Yield what each fetch brings in turn, once the next ones have begun."""
    begun: deque[Fetch] = deque()
    try:
        for fetch in fetches:
            fetch.begin()
            begun.append(fetch)
            if len(begun) > AHEAD:
                yield begun.popleft().finish()
        while begun:
            yield begun.popleft().finish()
    finally:
        for fetch in begun:
            fetch.drop()


class Fetch(Transfer):
    """One range of a file: requested ahead of time, and resumed where it breaks off.

    A file of unknown size, of `most_bytes` at most, may end before `end`.
    """

    def __init__(
        self,
        source: HttpSource,
        name: str,
        start: int,
        end: int,
        total: int | None = None,
        most_bytes: int = 0,
    ) -> None:
        super().__init__(source.folder + name, start)
        self.total = total
        """Bytes of the whole file, once they are known."""
        self._source, self._name, self._most_bytes = source, name, most_bytes
        self._start, self._end = start, end
        self._data = memoryview(b"")

    def begin(self) -> None:
        """Send the request. A failure is ignored here and retried by `finish`."""
        try:
            self._ask()
        except (OSError, http.client.HTTPException):
            self.drop()

    def finish(self) -> memoryview:
        """Return all bytes of the range; raise DataError if they cannot be had."""
        if self.position < self._end:
            self._source.troubles += self.persist(self._seconds())
        return self._data

    def give_up(self) -> None:
        """Close the connection that failed, and those that wait, which are as old."""
        self.drop()
        close_all(self._source.idle)

    def _ask(self) -> None:
        # Without If-Range: mirrors have other ETags for equal bytes, and the checksums tell others.
        headers = {"Range": f"bytes={self.position}-{self._end - 1}", **self._source.headers}
        self.connection = self._source.connection()
        self.connection.request("GET", self._source.path(self._name), headers=headers)

    def receive(self, deadline: float) -> None:
        """Receive what is missing; raise Trouble, OSError or HTTPException where it breaks off."""
        if not self.connection:
            self._ask()
        connection, stall_seconds = self.connection, self._source.timeouts.stall_seconds
        assert connection and connection.sock
        connection.sock.settimeout(min(stall_seconds, max(deadline - time.monotonic(), 0.01)))
        with connection.getresponse() as response:
            assert isinstance(response, TimedResponse)
            response.timed.deadline = deadline
            self._learn_size(
                check_response(response, self.position, self._end, self.total, self._most_bytes)
            )
            while self.position < self._end:
                missing = self._data[self.position - self._start :]
                count = response.readinto(missing[:PART_BYTES])
                if not count:
                    raise Trouble("the response broke off")
                self.position += count
            if response.isclosed():  # it was read to the end, so the next one can follow it
                self._source.idle.append(connection)
                self.connection = None
        self.drop()  # a body without a length may go on behind its range

    def _learn_size(self, total: int) -> None:
        import numpy as np  # its memory is not wiped first, as a bytearray's is

        self.total, self._end = total, min(self._end, total)
        if not self._data:
            self._data = np.empty(self._end - self._start, np.uint8).data

    def _seconds(self) -> float:
        """Return how long the range may take, retries included."""
        timeouts = self._source.timeouts
        if self._name == MANIFEST_NAME:
            return timeouts.first_seconds
        return timeouts.total_seconds * max(1.0, (self._end - self._start) / BLOCK_BYTES)


def check_response(
    response: http.client.HTTPResponse, start: int, end: int, total: int | None, most_bytes: int
) -> int:
    """Return the size of the file of which this is the range from `start` to `end`, or its end.

    Raise Trouble if a later request may help, WrongResponse if that is unlikely. `total` is the
    size if it is known; if not, it is at most `most_bytes`.
    """
    text = f"status {response.status} {shown(response.reason)}".rstrip()
    if response.status in TRANSIENT:
        seconds = whole_number(header(response, "Retry-After"), LONGEST_WISH)
        raise Trouble(text, float(seconds or 0))
    if response.status in REDIRECTS:
        where = shown(header(response, "Location")) or "nowhere"
        raise WrongResponse(
            f"{text} to {where}, which is not followed; to use files there, download them first"
        )
    if response.status == 200:
        is_page = header(response, "Content-Type").startswith("text/html")
        what = "a web page, not part of a data set" if is_page else "the server sends no ranges"
        raise WrongResponse(f"{text}: {what}; type: {called('serve')} FOLDER")
    if response.status != 206:
        raise WrongResponse(text + HINTS.get(response.status, ""))
    given = header(response, "Content-Range")
    numbers = CONTENT_RANGE.fullmatch(given)
    if not numbers:
        raise WrongResponse(f"{text}, but of no range ({shown(given) or 'no Content-Range'})")
    first, last, size = map(int, numbers.groups())
    if total is None and size > most_bytes:
        raise WrongResponse(f"{text}: {size} bytes are too many for such a file")
    if total not in (None, size):
        raise WrongResponse(f"{text}: {size} bytes long there, and not {total}")
    end = min(end, size)
    if (first, last) != (start, end - 1):
        raise WrongResponse(f"{text}, but of bytes {first} to {last}, up to {end}")
    return size
