"""Requests to a server of shards: within limits, and repeated if the response breaks off.

    Transfer.persist(seconds)     receives until all is there, or raises Unavailable
      └── connected(url, ...)     a connection whose responses come within the limits of its socket

If the server has a problem (no connection, a reset, a stall, 429, 5xx), the missing bytes are
requested again until the time is over. After a response that cannot be right (404, a page of a
portal), they are requested once more. Nothing in a response is trusted: numbers have limits, and
text is short and safe to print.
"""

from __future__ import annotations

import http.client
import io
import logging
import math
import random
import socket
import ssl
import time
import urllib.parse
from abc import ABC, abstractmethod
from typing import Any

from rackrun.contract import variables
from rackrun.data_location import refuse_passwords
from rackrun.errors import Unavailable, UsageError
from rackrun.shards.credentials import tls_context
from rackrun.terminal import one_line

SLOWEST = 1000  # bytes per second; a server that stays below this counts as gone
SHOWN = 200  # characters of a field
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
TOLD_TROUBLES = 3  # in a row: a line says why nothing comes
TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
REDIRECTS = {301, 302, 303, 307, 308}
EXAMPLE = "http://HOST:PORT/"

_log = logging.getLogger(__name__)
# Not the global generator: ranks seed it alike, and would all retry at the same time.
_dice = random.SystemRandom()


class Trouble(Exception):
    """A failure that a later request may not have."""

    def __init__(self, what: str, pause_seconds: float = 0.0) -> None:
        super().__init__(what)
        self.pause_seconds = pause_seconds
        """Time to wait before the next request, as the server asks."""


class WrongResponse(Trouble):
    """A response that cannot be right, unless bits flipped on the way."""


class Transfer(ABC):
    """Bytes of a file that are on their way."""

    def __init__(self, shown_url: str, position: int = 0) -> None:
        """Take the URL, for messages, and the first byte that is missing."""
        self.shown_url, self.position = shown_url, position
        self.connection: http.client.HTTPConnection | None = None

    @abstractmethod
    def receive(self, deadline: float) -> None:
        """Receive what is missing; raise Trouble, OSError or HTTPException where it breaks off."""

    def drop(self) -> None:
        """Close the connection; the next `receive` makes another one."""
        if self.connection:
            self.connection.close()
            self.connection = None

    def persist(self, seconds: float) -> int:
        """Receive until all is there; return how often that broke off.

        Raises Unavailable after the time.
        """
        deadline = time.monotonic() + seconds
        wrong_responses = breaks = in_a_row = 0
        while True:
            held = self.position
            try:
                self.receive(deadline)
                return breaks
            except ssl.SSLCertVerificationError as error:  # an OSError, but no retry helps
                hint = f"type: export {variables.AUTHORITY}=FILE"
                raise self._failure(f"not to be trusted: {error.verify_message}; {hint}") from None
            except (OSError, http.client.HTTPException, Trouble) as trouble:
                what = shown(getattr(trouble, "strerror", None) or str(trouble))
                self.give_up()
                breaks += 1
                wrong_responses += isinstance(trouble, WrongResponse)
                if wrong_responses > 1:
                    raise self._failure(what) from None
                in_a_row = 1 if self.position > held else in_a_row + 1
                if in_a_row == TOLD_TROUBLES:
                    _log.warning("%s: byte %d: %s; asking again", self.shown_url, held, what)
                if not _pause(in_a_row, getattr(trouble, "pause_seconds", 0.0), deadline):
                    raise self._failure(f"{what}; gave up after {seconds:g} s") from trouble

    def give_up(self) -> None:
        """Close the connection that failed."""
        self.drop()

    def _failure(self, what: str) -> Unavailable:
        return Unavailable(f"{self.shown_url}: byte {self.position}: {what}")


def _pause(troubles: int, asked_seconds: float, deadline: float) -> bool:
    """Wait before a retry, at least as long as asked; return False if the time is over by then."""
    longest = min(FIRST_PAUSE_SECONDS * 2 ** (troubles - 1), LONGEST_PAUSE_SECONDS)
    seconds = asked_seconds + _dice.uniform(0, longest)
    if time.monotonic() + seconds > deadline:
        return False
    time.sleep(seconds)
    return True


def checked(location: str) -> urllib.parse.SplitResult:
    """Return the parts of an http(s):// URL; UsageError for others, and for one with a password."""
    refuse_passwords(location)
    try:
        url = urllib.parse.urlsplit(location)
        is_whole = bool(url.hostname and url.hostname.encode("idna")) and url.port != 0
    except ValueError:  # a port that is none, a name that cannot be one
        is_whole = False
    if not is_whole or url.fragment or url.scheme not in ("http", "https"):
        raise UsageError(f"{location}: not the URL of a folder or a tar, as in {EXAMPLE}")
    return url


def connected(
    url: urllib.parse.SplitResult, seconds: float, tls: ssl.SSLContext | None = None
) -> http.client.HTTPConnection:
    """Return a connection for requests to the server of a URL."""
    host = url.hostname or ""
    made = http.client.HTTPConnection(host, url.port, timeout=seconds)
    if url.scheme == "https":
        context = tls or tls_context()
        made = http.client.HTTPSConnection(host, url.port, timeout=seconds, context=context)
    made.response_class = TimedResponse
    return made


class TimedBytes(io.RawIOBase):
    """The bytes of a socket; TimeoutError if too few come for too long, or too late.

    Only the time spent waiting counts: a reader may pause between reads.
    """

    def __init__(self, raw: io.RawIOBase, stall_seconds: float) -> None:
        self._raw = raw
        self._stall_seconds = stall_seconds
        self._waited_seconds, self._got = 0.0, 0
        self.deadline = math.inf
        """When the transfer must be done, by the monotonic clock."""

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
            raise TimeoutError("the response takes too long")
        return count

    def close(self) -> None:
        """Close the socket's file."""
        self._raw.close()
        super().close()


class TimedResponse(http.client.HTTPResponse):
    """A response whose head and body come within the limits of its socket."""

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


def header(response: http.client.HTTPResponse, name: str) -> str:
    """Return a field of the head, without the blanks that may surround it."""
    return response.getheader(name, "").strip(" \t")


def shown(text: str) -> str:
    """Return text of a server, short and safe to print."""
    return one_line(text[: 4 * SHOWN])[:SHOWN]
