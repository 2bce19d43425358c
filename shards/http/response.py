"""Decode the head of a server's response once, before any use.

Nothing in it is trusted: numbers have limits, a redirect is a path on the same server or nothing,
and text for messages is short and clean.
"""

import email.utils
import http.client
import re
import time
import urllib.parse
from dataclasses import dataclass

from rackrun.terminal import one_line

SHOWN = 200  # characters of a field
CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", re.ASCII)
SENDABLE = re.compile(r'"[!#-~]{0,500}"|[A-Za-z]{3}, [\x20-\x7e]{1,40}')  # a strong ETag, a date
PATH = re.compile(r"/[!-~]{0,4000}")
SECONDS = re.compile(r"\d{1,9}", re.ASCII)


@dataclass(frozen=True)
class ResponseHead:
    """The decoded head; every text in it is safe to print."""

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
    identity: str
    """The server's name for this version of the file, or empty."""
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
        identity=(field("ETag") or field("Last-Modified"))[:1000],
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


def sendable(identity: str) -> bool:
    """Return True if a request can ask for more of exactly this version (If-Range)."""
    return bool(SENDABLE.fullmatch(identity))


def _pause_seconds(text: str) -> float:
    """Return the seconds to wait, given as a number or a date; 0 for anything else."""
    if SECONDS.fullmatch(text):
        return float(text)
    try:
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError, OSError, TypeError, IndexError):
        return 0.0


def _shown(text: str) -> str:
    return one_line(text[: 4 * SHOWN])[:SHOWN]
