"""One range of a file on an HTTP server: requested, verified, resumed where it broke off.

If the server has a problem (no connection, a reset, a stall, 429, 5xx), the missing bytes are
requested again until `Timeouts.total_seconds` are over. After a wrong response (404, a file of
another size, other bytes than requested) the range is requested once more, over another connection;
a second wrong response is a DataError. Every error names URL, byte and status.

The head of a response is decoded once, before any use. Nothing in it is trusted: numbers have
limits, a redirect is a path on the same server or nothing, and text is short and safe to print.
"""

import email.utils
import http.client
import logging
import random
import re
import ssl
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

from rackrun.commands import called
from rackrun.contract import variables
from rackrun.errors import Unavailable
from rackrun.shards.http.connection import Connection
from rackrun.shards.http.server import ShardServer
from rackrun.shards.source import Stored
from rackrun.terminal import one_line

# Ranges in flight wait in the kernel: four of 4 MiB fall out of the CPU's cache before they are
# read, and cost a fifth more CPU time.
RANGE_BYTES = 2 << 20
_SLICE_BYTES = 1 << 20  # maximum that is fetched twice if a response breaks off
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
_SILENT_TROUBLES = 2  # retries without a warning; more in a row are explained by one
_MOST_MOVES = 3

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_REDIRECTS = {301, 302, 303, 307, 308}
_HINTS = {
    401: f"; put user:password into a file and type: export {variables.CREDENTIALS}=FILE",
    403: f"; the server asks for a certificate? type: export {variables.CERTIFICATE}=FILE",
    404: "; is this the folder that the converter made, served whole?",
}
_ANSWERED: set[str] = set()  # servers that have answered this process, or the one it forked from

SHOWN = 200  # characters of a field
CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", re.ASCII)
PATH = re.compile(r"/[!-~]{0,4000}")
SECONDS = re.compile(r"\d{1,9}", re.ASCII)

_log = logging.getLogger(__name__)
# Not the global generator: ranks seed it alike, and would all retry at the same time.
_dice = random.SystemRandom()


@dataclass(frozen=True)
class ResponseHead:
    """The head of a response; every text in it is safe to print."""

    status: int
    status_text: str
    """The status with its reason."""
    range: tuple[int, int, int] | None
    """First byte, last byte, bytes of the whole file."""
    range_text: str
    length: str
    encoding: str
    kind: str
    """The media type."""
    location: str
    pause_seconds: float
    """Time to wait before the next request (Retry-After)."""


def decoded(response: http.client.HTTPResponse) -> ResponseHead:
    """Return the head of a response; invalid fields count as absent."""

    def field(name: str) -> str:
        return response.getheader(name, "").strip(" \t")

    text = field("Content-Range")
    numbers = CONTENT_RANGE.fullmatch(text)
    first, last, total = map(int, numbers.groups()) if numbers else (0, 0, 0)
    return ResponseHead(
        status=response.status,
        status_text=f"status {response.status} {_shown(response.reason)}".rstrip(),
        range=(first, last, total) if numbers else None,
        range_text=_shown(text),
        length=_shown(field("Content-Length")),
        encoding=_shown(field("Content-Encoding")) or "identity",
        kind=_shown(field("Content-Type").partition(";")[0]),
        location=_shown(field("Location")),
        pause_seconds=_pause_seconds(field("Retry-After")),
    )


def moved(url: str, location: str) -> str | None:
    """Return the path on the same server that a redirect leads to; None for any other URL."""
    try:
        requested = urllib.parse.urlsplit(url)
        target = urllib.parse.urlsplit(urllib.parse.urljoin(url, location))
    except ValueError:
        return None
    same = (target.scheme, target.netloc) == (requested.scheme, requested.netloc)
    return target.path if location and same and PATH.fullmatch(target.path) else None


def _pause_seconds(text: str) -> float:
    if SECONDS.fullmatch(text):
        return float(text)
    try:
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError, OSError, TypeError, IndexError):
        return 0.0


def _shown(text: str) -> str:
    return one_line(text[: 4 * SHOWN])[:SHOWN]


class _Trouble(Exception):
    """A failure that a later request may not have."""

    def __init__(self, what: str, pause_seconds: float = 0.0) -> None:
        super().__init__(what)
        self.pause_seconds = pause_seconds  # as the server asks


class _Retries:
    """Pauses between requests: exponential, with jitter, and at least as long as Retry-After."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.troubles = 0  # since something last arrived

    def pause(self, asked_seconds: float) -> bool:
        """Wait before a retry; return False at once if the time would be over by then."""
        self.troubles += 1
        longest = min(_FIRST_PAUSE_SECONDS * 2 ** (self.troubles - 1), _LONGEST_PAUSE_SECONDS)
        seconds = asked_seconds + _dice.uniform(0, longest)
        if time.monotonic() + seconds > self.deadline:
            return False
        time.sleep(seconds)
        return True


class Fetch:
    """One range of a file: requested ahead of time, and resumed where it breaks off.

    `length` None requests a whole file of unknown size, up to `most_bytes`; `total` is the size of
    the file, if known.
    """

    def __init__(
        self,
        server: ShardServer,
        name: str,
        offset: int,
        length: int | None,
        total: int | None,
        most_bytes: int = 0,
    ) -> None:
        self._server = server
        self._name = name
        self._home = server.path(name)
        self._path = self._home  # until the server redirects it
        self._next = offset  # the first missing byte
        self._end = None if length is None else offset + length
        self._total = total
        self._most_bytes = most_bytes
        self._moves = 0
        self._wrongs = 0  # wrong responses
        self._connection: Connection | None = None
        self._room: memoryview | None = None  # where the next bytes go, if into one buffer

    def begin(self) -> None:
        """Send the request. A failure is ignored here and retried by `finish`."""
        try:
            self._ask()
        except (OSError, http.client.HTTPException):
            self.drop()

    def finish(self) -> memoryview:
        """Return all bytes of the range; raise DataError if they are of another range or file."""
        import numpy as np  # its memory is not wiped first, as a bytearray's is

        assert self._end is not None
        self._room = together = np.empty(self._end - self._next, np.uint8).data
        for _ in self.parts():
            pass
        return together

    def parts(self) -> Iterator[Stored]:
        """Yield the bytes as they arrive, in parts of at most 1 MiB."""
        timeouts = self._server.timeouts
        if self._server.location in _ANSWERED:
            blocks = ((self._end or 0) - self._next) / RANGE_BYTES
            retries = _Retries(timeouts.total_seconds * max(1.0, blocks))
        else:
            retries = _Retries(timeouts.first_seconds)
        try:
            while self._next != self._end:
                held = self._next
                try:
                    yield from self._receive(retries)
                except ssl.SSLCertVerificationError as error:  # an OSError, but no retry helps
                    hint = f"type: export {variables.AUTHORITY}=FILE"
                    raise self._error(
                        f"not to be trusted: {error.verify_message}; {hint}"
                    ) from None
                except (OSError, http.client.HTTPException, _Trouble) as trouble:
                    if self._next > held:
                        retries.troubles = 0
                    self._retry(retries, trouble)
        finally:
            self.drop()

    def drop(self) -> None:
        """Close the connection, and discard the bytes in flight."""
        if self._connection:
            self._connection.close()
            self._connection = None

    def _retry(self, retries: _Retries, trouble: Exception) -> None:
        """Prepare the next request after a pause; raise DataError when the time is over."""
        self.drop()
        self._server.pool.forget()  # idle connections are as old as the broken one
        self._server.troubles += 1
        what = " ".join(str(getattr(trouble, "strerror", None) or trouble).split())
        if retries.troubles == _SILENT_TROUBLES:
            _log.warning("%s: byte %d: %s; asking again", self._url, self._next, what)
        if not retries.pause(getattr(trouble, "pause_seconds", 0.0)):
            raise self._error(f"{what}; gave up after {retries.seconds:g} s") from trouble

    def _ask(self) -> None:
        last = "" if self._end is None else self._end - 1
        # Without If-Range: mirrors have other ETags for equal bytes, and the checksums tell others.
        headers = {"Range": f"bytes={self._next}-{last}", **self._server.headers}
        self._connection = self._server.pool.take()
        self._connection.request("GET", self._path, headers=headers)

    def _receive(self, retries: _Retries) -> Iterator[Stored]:
        """Yield the response; raise _Trouble, OSError or HTTPException where it breaks off."""
        if not self._connection:
            self._ask()
        assert self._connection
        self._connection.wait_until(retries.deadline)
        response = self._connection.getresponse()
        _ANSWERED.add(self._server.location)
        head = decoded(response)
        self._check_status(head)
        part = self._part(response)  # first: a head that broke off looks like one that is wrong
        self._check_range(head)
        assert self._end is not None
        part = part[: self._end - self._next]  # a body without a length may go on behind its range
        while True:
            self._next += len(part)
            self._room = self._room and self._room[len(part) :]
            paused = time.monotonic()
            yield part
            retries.deadline += time.monotonic() - paused  # only the server's time counts
            if self._next == self._end:
                break
            self._connection.wait_until(retries.deadline)
            part = self._part(response)
        if response.isclosed():  # it was read to the end, so the next one can follow it
            self._server.pool.give(self._connection)
            self._connection = None
        self.drop()

    def _part(self, response: http.client.HTTPResponse) -> Stored:
        missing = _SLICE_BYTES if self._end is None else self._end - self._next
        size = min(_SLICE_BYTES, missing)
        part: Stored
        if self._room is None:
            part = response.read(size)
        else:  # straight from the socket to where the caller wants it, without a copy
            part = self._room[: response.readinto(self._room[:size])]
        if not part:
            raise _Trouble("the answer broke off")
        return part

    def _check_status(self, head: ResponseHead) -> None:
        """Return for a part of a file; raise _Trouble if a retry may help, otherwise DataError."""
        if head.status in _TRANSIENT:
            raise _Trouble(head.status_text, head.pause_seconds)
        if head.status in _REDIRECTS:
            raise self._move(head)
        if head.status == 200 and head.kind == "text/html":
            raise self._wrong(
                f"{head.status_text}: a page, and no part of a data set; does a portal or another"
                " server answer here?"
            )
        if head.status == 200:
            raise self._wrong(
                f"{head.status_text}: the server sends no ranges; type: {called('serve')} FOLDER"
            )
        if head.status != 206:
            raise self._wrong(head.status_text + _HINTS.get(head.status, ""))

    def _check_range(self, head: ResponseHead) -> None:
        """Raise DataError unless these are the requested bytes of a file of the right size."""
        if head.encoding != "identity":
            raise self._wrong(
                f"{head.status_text}: sent as {head.encoding}, which was not asked for"
            )
        if not head.range:
            given = head.range_text or "no Content-Range"
            raise self._wrong(f"{head.status_text}, but of no range ({given})")
        first, last, total = head.range
        if self._total not in (None, total):
            raise self._wrong(
                f"{head.status_text}: {total} bytes long there, and not {self._total}"
            )
        if self._end is None and total > self._most_bytes:
            raise self._wrong(f"{head.status_text}: {total} bytes are too many for such a file")
        end = total if self._end is None else self._end
        if (first, last) != (self._next, end - 1):
            raise self._wrong(f"{head.status_text}, but of bytes {first} to {last}, up to {end}")
        if head.length not in ("", str(last - first + 1)):
            raise self._wrong(
                f"{head.status_text}: {head.length} bytes announced for {head.range_text}"
            )
        self._total, self._end = total, end

    def _move(self, head: ResponseHead) -> Exception:
        path = moved(self._url, head.location)
        self._moves += 1
        if path is None or self._moves > _MOST_MOVES:
            where = head.location or "nowhere"
            return self._wrong(
                f"{head.status_text} to {where}, which is not followed; if the files are to be "
                "downloaded, do that first"
            )
        self._path = path
        return _Trouble(f"{head.status_text} to {head.location}")

    def _wrong(self, what: str) -> Exception:
        self._wrongs += 1
        self._path = self._home  # where it was redirected to may be what is wrong
        return _Trouble(what) if self._wrongs == 1 else self._error(what)

    @property
    def _url(self) -> str:
        return self._server.location + self._name

    def _error(self, what: str) -> Unavailable:
        return Unavailable(f"{self._url}: byte {self._next}: {what}")
