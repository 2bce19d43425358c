"""The head of a server's answer, decoded once, before anybody acts upon it.

Nothing in it is believed: numbers have limits, a redirect is a path on the same server or nothing,
and what may be shown to somebody is short and clean.
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
class Answer:
    """What the head says; every text in it can be shown."""

    status: int
    words: str
    """The status as people read it, with its reason."""
    range: tuple[int, int, int] | None
    """First byte, last byte, bytes of the whole file."""
    range_text: str
    length: str
    encoding: str
    kind: str
    """The media type."""
    location: str
    identity: str
    """What the server calls this version of the file; empty where it has no name for it."""
    pause_seconds: float
    """How long the server wishes not to be asked."""


def decoded(response: http.client.HTTPResponse) -> Answer:
    """The head of an answer; what cannot be understood is as if it was not there."""

    def field(name: str) -> str:
        return response.getheader(name, "").strip(" \t")

    text = field("Content-Range")
    numbers = CONTENT_RANGE.fullmatch(text)
    first, last, total = map(int, numbers.groups()) if numbers else (0, 0, 0)
    return Answer(
        status=response.status,
        words=f"status {response.status} {_shown(response.reason)}".rstrip(),
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
    """The path on the same server that a redirect leads to; None for any other place."""
    try:
        here = urllib.parse.urlsplit(url)
        there = urllib.parse.urlsplit(urllib.parse.urljoin(url, location))
    except ValueError:
        return None
    same = (there.scheme, there.netloc) == (here.scheme, here.netloc)
    return there.path if location and same and PATH.fullmatch(there.path) else None


def sendable(identity: str) -> bool:
    """Whether a server can be asked for more of exactly this version (If-Range)."""
    return bool(SENDABLE.fullmatch(identity))


def _pause_seconds(wish: str) -> float:
    """Seconds to wait, as a server asks for in a number or a date; 0 for anything else."""
    if SECONDS.fullmatch(wish):
        return float(wish)
    try:
        return max(email.utils.parsedate_to_datetime(wish).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError, OSError, TypeError, IndexError):
        return 0.0


def _shown(text: str) -> str:
    return one_line(text[: 4 * SHOWN])[:SHOWN]
