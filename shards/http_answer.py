"""The answer to a request for a range: received within limits, and checked before use.

Nothing in it is trusted: numbers have limits, and text is short and safe to print.
"""

import email.utils
import http.client
import io
import math
import re
import socket
import time
from typing import Any

from rackrun.commands import called
from rackrun.contract import variables
from rackrun.terminal import one_line

SLOWEST = 1000  # bytes per second; a server that stays below this counts as gone
SHOWN = 200  # characters of a field
CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", re.ASCII)
SECONDS = re.compile(r"\d{1,9}", re.ASCII)

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_REDIRECTS = {301, 302, 303, 307, 308}
_HINTS = {
    401: f"; put user:password into a file and type: export {variables.CREDENTIALS}=FILE",
    403: f"; the server asks for a certificate? type: export {variables.CERTIFICATE}=FILE",
    404: "; is this the folder that the converter made, served whole?",
}


class Trouble(Exception):
    """A failure that a later request may not have."""

    def __init__(self, what: str, pause_seconds: float = 0.0) -> None:
        super().__init__(what)
        self.pause_seconds = pause_seconds
        """Time to wait before the next request, as the server asks."""


class WrongAnswer(Trouble):
    """An answer that cannot be right, unless bits flipped on the way."""


class TimedBytes(io.RawIOBase):
    """The bytes of a socket; TimeoutError if too few come for too long, or too late.

    Only the time spent waiting counts: a reader may pause between reads.
    """

    def __init__(self, raw: io.RawIOBase, stall_seconds: float) -> None:
        self._raw = raw
        self._stall_seconds = stall_seconds
        self._waited_seconds, self._got = 0.0, 0
        self.deadline = math.inf
        """On the monotonic clock."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Receive at most so many bytes as there is room for."""
        begun = time.monotonic()
        count = self._raw.readinto(buffer)
        now = time.monotonic()
        self._waited_seconds += now - begun
        self._got += count or 0
        if self._got >= SLOWEST * self._stall_seconds:
            self._waited_seconds, self._got = 0.0, 0
        elif self._waited_seconds > self._stall_seconds:
            raise TimeoutError(f"under {SLOWEST} bytes/s for {self._stall_seconds:g} s")
        if now > self.deadline:
            raise TimeoutError("the answer takes too long")
        return count

    def close(self) -> None:
        """Close the socket's file."""
        self._raw.close()
        super().close()


class Answer(http.client.HTTPResponse):
    """An answer whose head and body come within the limits of its socket."""

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self._head_seconds = sock.gettimeout() or math.inf
        self.timed = TimedBytes(self.fp.detach(), self._head_seconds)
        self.fp = io.BufferedReader(self.timed)

    def begin(self) -> None:
        """Receive the head, in the time of a stall: one may follow the other without end."""
        self.timed.deadline = time.monotonic() + self._head_seconds
        super().begin()
        self.timed.deadline = math.inf


def check_answer(
    answer: http.client.HTTPResponse, start: int, end: int, total: int | None, most_bytes: int
) -> int:
    """Return the size of the file of which this is the range from `start` to `end`, or its end.

    Raise Trouble if a later request may help, WrongAnswer if that is unlikely. `total` is the size
    if it is known; if not, it is at most `most_bytes`.
    """
    text = f"status {answer.status} {shown(answer.reason)}".rstrip()
    if answer.status in _TRANSIENT:
        raise Trouble(text, pause_seconds(_field(answer, "Retry-After")))
    if answer.status in _REDIRECTS:
        where = shown(_field(answer, "Location")) or "nowhere"
        raise WrongAnswer(
            f"{text} to {where}, which is not followed; if the files are to be downloaded, do that"
            " first"
        )
    if answer.status == 200 and _field(answer, "Content-Type").startswith("text/html"):
        raise WrongAnswer(
            f"{text}: a page, and no part of a data set; does a portal or another server answer"
            " here?"
        )
    if answer.status == 200:
        raise WrongAnswer(f"{text}: the server sends no ranges; type: {called('serve')} FOLDER")
    if answer.status != 206:
        raise WrongAnswer(text + _HINTS.get(answer.status, ""))
    encoding = _field(answer, "Content-Encoding") or "identity"
    if encoding != "identity":
        raise WrongAnswer(f"{text}: sent as {shown(encoding)}, which was not asked for")
    return _check_range(answer, text, start, end, total, most_bytes)


def _check_range(
    answer: http.client.HTTPResponse,
    text: str,
    start: int,
    end: int,
    total: int | None,
    most_bytes: int,
) -> int:
    given = _field(answer, "Content-Range")
    numbers = CONTENT_RANGE.fullmatch(given)
    if not numbers:
        raise WrongAnswer(f"{text}, but of no range ({shown(given) or 'no Content-Range'})")
    first, last, size = map(int, numbers.groups())
    if total is None and size > most_bytes:
        raise WrongAnswer(f"{text}: {size} bytes are too many for such a file")
    if total not in (None, size):
        raise WrongAnswer(f"{text}: {size} bytes long there, and not {total}")
    end = min(end, size)
    if (first, last) != (start, end - 1):
        raise WrongAnswer(f"{text}, but of bytes {first} to {last}, up to {end}")
    return size


def _field(answer: http.client.HTTPResponse, name: str) -> str:
    return answer.getheader(name, "").strip(" \t")


def pause_seconds(text: str) -> float:
    """Return the time in Retry-After, in seconds or as a date; 0 for anything else."""
    if SECONDS.fullmatch(text):
        return float(text)
    try:
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError, OSError, TypeError, IndexError):
        return 0.0


def shown(text: str) -> str:
    """Return text of a server, short and safe to print."""
    return one_line(text[: 4 * SHOWN])[:SHOWN]
