"""A shard folder on an HTTP server: ranges, asked for ahead, resumed where they break off.

    stream(shard), reads(ranges)    in order, several requested before the first is needed
      └── Fetch                     one range: requested, checked, resumed where it broke off

If the server has a problem (no connection, a reset, a stall, 429, 5xx), the missing bytes are
requested again until `Timeouts.total_seconds` are over. After an answer that cannot be right (404,
a redirect, a file of another size), the range is requested once more, over another connection; a
second one is a DataError. Every error names URL, byte and status. Whether bytes are right is told
by digests and checksums alone. Reading ahead needs no threads: the kernel receives meanwhile.
"""

from __future__ import annotations

import http.client
import logging
import os
import random
import ssl
import time
import urllib.parse
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from rackrun.contract import variables
from rackrun.errors import DataError, Unavailable, UsageError
from rackrun.shard_folder import folder_and_version
from rackrun.shards.credentials import authorization, tls_context
from rackrun.shards.host_folder import Bytes, kept_index
from rackrun.shards.http_answer import Answer, Trouble, WrongAnswer, check_answer, shown
from rackrun.shards.index import Manifest, Shard, Split, largest_index
from rackrun.shards.source import Range, Source, Stored, verified

# Ranges in flight wait in the kernel: four of 4 MiB fall out of the CPU's cache before they are
# read, and cost a fifth more CPU time.
RANGE_BYTES = 2 << 20
AHEAD = 2  # ranges requested while the first of them is being used
_PART_BYTES = 1 << 20  # at most so much is fetched twice if an answer breaks off
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
_TOLD_TROUBLES = 3  # in a row: a line says why nothing comes
_IDLE = 16  # connections kept for the next request
_EXAMPLE = "http://HOST:PORT/"
_PATH_LETTERS = "/%:@!$&'()*+,;=~"  # what a path may hold as it is (RFC 3986)
_ANSWERED: set[str] = set()  # servers that have answered this process, or one that it comes from

_log = logging.getLogger(__name__)
# Not the global generator: ranks seed it alike, and would all retry at the same time.
_dice = random.SystemRandom()


@dataclass(frozen=True)
class Timeouts:
    """Limits on waiting for a server, in seconds."""

    connect_seconds: float = 5.0
    """For a connection."""
    stall_seconds: float = 30.0
    """For bytes, while fewer than 1 kB arrive in a second."""
    total_seconds: float = 120.0
    """For a block, including all retries."""
    first_seconds: float = 15.0
    """For the very first answer: a wrong address should not look like a failing server."""


class HttpSource(Source):
    """A shard folder at an http(s):// URL."""

    def __init__(self, location: str, timeouts: Timeouts | None = None) -> None:
        folder, version = folder_and_version(location)
        self.folder = folder.rstrip("/") + "/"
        self.timeouts = timeouts or Timeouts()
        self.troubles = 0  # answers that were wrong, broke off or did not come
        self.url = _checked(self.folder)
        self.idle: deque[tuple[int, http.client.HTTPConnection]] = deque()
        """Connections that wait for a request, each with the process that made it."""
        weakref.finalize(self, close_all, self.idle)
        named = f"{self.folder}@{version}" if version else self.folder
        super().__init__(named, named, self.timeouts)

    def __setstate__(self, manifest: Manifest) -> None:
        super().__setstate__(manifest)
        _ANSWERED.add(self.folder)  # as the process that has pickled it knows

    @property
    def manifest(self) -> Manifest:
        """The manifest of the data set; DataError if the server has none."""
        manifest = super().manifest
        if manifest.tars:  # believed of a folder of one's own, never of a server
            raise DataError(
                f"{self.location}: its manifest names another server for the tars; copy the index "
                "folder here, and give its path"
            )
        return manifest

    def stream(self, shard: Shard) -> Iterator[Stored]:
        """Yield the bytes of a shard in blocks; DataError at the end if its digest is wrong."""
        starts = range(0, shard.bytes, RANGE_BYTES)
        blocks = ((shard, start, min(RANGE_BYTES, shard.bytes - start)) for start in starts)
        yield from verified(self.reads(blocks), shard, self.folder + shard.name)

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Yield each range in turn, while the next ones are being fetched."""
        fetches = (
            Fetch(self, shard.name, offset, offset + length, shard.bytes)
            for shard, offset, length in ranges
        )
        return self._ahead(fetches)

    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return exactly `length` bytes of a shard from `offset` on."""
        return Fetch(self, shard.name, offset, offset + length, shard.bytes).finish()

    def index_data(self, part: Split, again: bool) -> Bytes:
        """Return the bytes of an index, which the processes of this host fetch once."""
        name, most_bytes = f"{part.index_sha256}.npy", largest_index(part.samples)
        return kept_index(name, lambda: self.read_file(part.index, most_bytes), again)

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return a file of unknown size; raise DataError if it is larger than allowed."""
        return b"".join(self.file(name, most_bytes))

    def file(self, name: str, most_bytes: int) -> Iterator[Stored]:
        """Yield a file of unknown size in blocks."""
        first = Fetch(self, name, 0, RANGE_BYTES, most_bytes=most_bytes)
        yield first.finish()
        total = first.total or 0
        starts = range(RANGE_BYTES, total, RANGE_BYTES)
        yield from self._ahead(
            Fetch(self, name, start, min(start + RANGE_BYTES, total), total) for start in starts
        )

    def _ahead(self, fetches: Iterable[Fetch]) -> Iterator[Stored]:
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

    def path(self, name: str) -> str:
        """Return the path of a file, as a request has it."""
        return urllib.parse.quote(self.url.path, safe=_PATH_LETTERS) + name

    @cached_property
    def headers(self) -> dict[str, str]:
        """The headers of every request: credentials, and no content encoding."""
        host, tls = self.url.hostname or "", self.url.scheme == "https"
        return {"Accept-Encoding": "identity", **authorization(host, tls)}

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return tls_context()

    def connection(self) -> http.client.HTTPConnection:
        """Return an idle connection of this process, or a new one."""
        for process, connection in _taken(self.idle):
            if process == os.getpid():
                return connection
            connection.close()  # of the process that forked this one, which keeps its own
        host, port, seconds = self.url.hostname or "", self.url.port, self.timeouts.connect_seconds
        made: http.client.HTTPConnection
        if self.url.scheme == "https":
            made = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        else:
            made = http.client.HTTPConnection(host, port, timeout=seconds)
        made.response_class = Answer
        return made

    def keep(self, connection: http.client.HTTPConnection) -> None:
        """Take back a connection whose answer was read to the end."""
        if len(self.idle) < _IDLE:
            self.idle.append((os.getpid(), connection))
        else:
            connection.close()


def close_all(connections: deque[tuple[int, http.client.HTTPConnection]]) -> None:
    """Close connections that wait for a request."""
    for _, connection in _taken(connections):
        connection.close()


def _taken(
    connections: deque[tuple[int, http.client.HTTPConnection]],
) -> Iterator[tuple[int, http.client.HTTPConnection]]:
    with suppress(IndexError):  # none is left; another thread may have taken the last one
        while True:
            yield connections.pop()  # used last, it is the least likely to be closed


def _checked(location: str) -> urllib.parse.SplitResult:
    try:
        url = urllib.parse.urlsplit(location)
    except ValueError:
        raise UsageError(f"{location}: not the URL of a folder, as in {_EXAMPLE}") from None
    if url.username is not None:
        raise UsageError(
            f"{url.scheme}://…@{url.hostname}: passwords in URLs end up in logs; put user:password"
            f" into a file and type: export {variables.CREDENTIALS}=FILE"
        )
    try:
        whole = bool(url.hostname and url.hostname.encode("idna")) and url.port != 0
    except ValueError:  # a port that is none, a name that cannot be one
        whole = False
    if not whole or url.query or url.fragment or url.scheme not in ("http", "https"):
        raise UsageError(f"{location}: not the URL of a folder, as in {_EXAMPLE}")
    return url


class Fetch:
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
        self.total = total
        """Bytes of the whole file, once they are known."""
        self._source, self._name, self._most_bytes = source, name, most_bytes
        self._start = self._next = start  # the first missing byte
        self._end = end
        self._connection: http.client.HTTPConnection | None = None
        self._data = memoryview(b"")

    def begin(self) -> None:
        """Send the request. A failure is ignored here and retried by `finish`."""
        try:
            self._ask()
        except (OSError, http.client.HTTPException):
            self.drop()

    def finish(self) -> memoryview:
        """Return all bytes of the range; raise DataError if they cannot be had."""
        seconds = self._seconds()
        deadline = time.monotonic() + seconds
        wrong_answers = troubles = 0  # troubles since something last arrived
        while self._next < self._end:
            held = self._next
            try:
                self._receive(deadline)
            except ssl.SSLCertVerificationError as error:  # an OSError, but no retry helps
                hint = f"type: export {variables.AUTHORITY}=FILE"
                raise self._error(f"not to be trusted: {error.verify_message}; {hint}") from None
            except (OSError, http.client.HTTPException, Trouble) as trouble:
                what = shown(getattr(trouble, "strerror", None) or str(trouble))
                self.drop()
                close_all(self._source.idle)  # they are as old as the one that failed
                self._source.troubles += 1
                wrong_answers += isinstance(trouble, WrongAnswer)
                if wrong_answers > 1:
                    raise self._error(what) from None
                troubles = 1 if self._next > held else troubles + 1
                if troubles == _TOLD_TROUBLES:
                    _log.warning("%s: %s; asking again", self._place, what)
                if not _pause(troubles, getattr(trouble, "pause_seconds", 0.0), deadline):
                    raise self._error(f"{what}; gave up after {seconds:g} s") from trouble
        return self._data

    def drop(self) -> None:
        """Close the connection, and discard the bytes in flight."""
        if self._connection:
            self._connection.close()
            self._connection = None

    def _ask(self) -> None:
        # Without If-Range: mirrors have other ETags for equal bytes, and the checksums tell others.
        headers = {"Range": f"bytes={self._next}-{self._end - 1}", **self._source.headers}
        self._connection = self._source.connection()
        self._connection.request("GET", self._source.path(self._name), headers=headers)

    def _receive(self, deadline: float) -> None:
        """Receive what is missing; raise Trouble, OSError or HTTPException where it breaks off."""
        if not self._connection:
            self._ask()
        connection, limit = self._connection, self._source.timeouts.stall_seconds
        assert connection and connection.sock
        connection.sock.settimeout(min(limit, max(deadline - time.monotonic(), 0.01)))
        with connection.getresponse() as answer:
            assert isinstance(answer, Answer)
            answer.timed.deadline = deadline
            _ANSWERED.add(self._source.folder)
            size = check_answer(answer, self._next, self._end, self.total, self._most_bytes)
            self._learn_size(size)
            while self._next < self._end:
                missing = self._data[self._next - self._start :]
                count = answer.readinto(missing[:_PART_BYTES])
                if not count:
                    raise Trouble("the answer broke off")
                self._next += count
            if answer.isclosed():  # it was read to the end, so the next one can follow it
                self._source.keep(connection)
                self._connection = None
        self.drop()  # a body without a length may go on behind its range

    def _learn_size(self, total: int) -> None:
        import numpy as np  # its memory is not wiped first, as a bytearray's is

        self.total, self._end = total, min(self._end, total)
        if not self._data:
            self._data = np.empty(self._end - self._start, np.uint8).data

    def _seconds(self) -> float:
        """Return how long the range may take, retries included."""
        timeouts = self._source.timeouts
        if self._source.folder not in _ANSWERED:
            return timeouts.first_seconds
        return timeouts.total_seconds * max(1.0, (self._end - self._start) / RANGE_BYTES)

    @property
    def _place(self) -> str:
        return f"{self._source.folder}{self._name}: byte {self._next}"

    def _error(self, what: str) -> Unavailable:
        return Unavailable(f"{self._place}: {what}")


def _pause(troubles: int, asked_seconds: float, deadline: float) -> bool:
    """Wait before a retry, at least as long as asked; return False if the time is over by then."""
    longest = min(_FIRST_PAUSE_SECONDS * 2 ** (troubles - 1), _LONGEST_PAUSE_SECONDS)
    seconds = asked_seconds + _dice.uniform(0, longest)
    if time.monotonic() + seconds > deadline:
        return False
    time.sleep(seconds)
    return True
