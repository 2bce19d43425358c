"""Tars without an index as streams: a file, a URL, or what a command prints.

    with opened(tar) as stream: stream.read(size)

A response that breaks off is continued where the server can send parts of the same file. Redirects
are followed to https:// or the same server, without credentials.
"""

from __future__ import annotations

import http.client
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from rackrun.data_location import PIPE, WEB
from rackrun.errors import DataError
from rackrun.shards.credentials import authorization
from rackrun.shards.http_client import (
    REDIRECTS,
    TRANSIENT,
    Transfer,
    Trouble,
    checked,
    connected,
    header,
)
from rackrun.terminal import one_line

STALL_SECONDS = 30.0
TOTAL_SECONDS = 60.0  # for some bytes, including all retries
END_SECONDS = 1.0  # for a command to end after its output
REST_BYTES = 1 << 20  # at once, of what a command prints and nobody needs
MOST_REDIRECTS = 5


class Stream(Protocol):
    """A tar that is read once, from the beginning."""

    def read(self, size: int, /) -> bytes:
        """Return up to so many bytes; none at the end."""


@contextmanager
def opened(tar: str, first_seconds: float = TOTAL_SECONDS) -> Iterator[Stream]:
    """Open a tar for reading; DataError if that fails, or if it breaks off.

    `first_seconds` is how long a server may refuse or fail before its first response.
    """
    if tar.startswith(PIPE):
        with _printed(tar) as output:
            yield output
    elif tar.startswith(WEB):
        download = _Download(tar, first_seconds)
        try:
            yield download
        finally:
            download.drop()
    else:
        try:
            with Path(tar).open("rb") as file:
                yield file
        except OSError as error:
            raise DataError(f"{tar}: cannot be read: {error.strerror or error}") from None


@contextmanager
def _printed(tar: str) -> Iterator[IO[bytes]]:
    command = tar.removeprefix(PIPE)  # of the user, who has typed it
    with subprocess.Popen(  # noqa: S602
        command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        try:
            yield process.stdout
            while process.stdout.read(REST_BYTES):  # a command that cannot print all would fail
                pass
            if code := process.wait():
                raise DataError(f"{one_line(tar)}: the command ended with {code}")
        except DataError:  # of what it printed: if it has failed, that is why
            with suppress(subprocess.TimeoutExpired):
                if code := process.wait(END_SECONDS):
                    raise DataError(f"{one_line(tar)}: the command ended with {code}") from None
            raise
        finally:
            process.kill()


class _Download(Transfer):
    """A tar on a server; reads go on where its response broke off."""

    def __init__(self, url: str, first_seconds: float) -> None:
        super().__init__(url)
        self._first_seconds = first_seconds
        self._url = checked(url)
        self._response: http.client.HTTPResponse | None = None
        self._length = 0  # of the tar; 0: not known
        self._validator = ""  # of the file whose first bytes are here
        self._wanted_bytes, self._data = 0, b""

    def read(self, size: int) -> bytes:
        """Return up to so many bytes; none at the end."""
        self._wanted_bytes = size
        self.persist(TOTAL_SECONDS if self.position else self._first_seconds)
        return self._data

    def receive(self, deadline: float) -> None:
        """Receive the next bytes; none at the end."""
        self._response = self._response or self._requested()
        self._data = self._response.read(self._wanted_bytes)
        if not self._data and self._length not in (0, self.position):
            raise Trouble("the response broke off")
        self.position += len(self._data)

    def drop(self) -> None:
        """Close the connection."""
        super().drop()
        self._response = None

    def _requested(self) -> http.client.HTTPResponse:
        url = self._url
        for _ in range(1 + MOST_REDIRECTS):
            response = self._response_to(url)
            if response.status not in REDIRECTS:
                break
            url = self._redirected(url, header(response, "Location"))
        if response.status in TRANSIENT:
            raise Trouble(f"status {response.status}")
        if response.status not in (200, 206):
            raise DataError(f"{self.shown_url}: status {response.status}")
        if header(response, "Content-Encoding") not in ("", "identity"):
            raise DataError(f"{self.shown_url}: the server compresses it")
        if self.position:
            self._require_the_rest(response)
        else:
            self._learn(response)
        return response

    def _response_to(self, url: urllib.parse.SplitResult) -> http.client.HTTPResponse:
        headers = {"Accept-Encoding": "identity"}
        if (url.scheme, url.netloc) == (self._url.scheme, self._url.netloc):
            headers |= authorization(url.hostname or "", url.scheme == "https")
        if self.position:
            headers |= {"Range": f"bytes={self.position}-", "If-Range": self._validator}
        self.drop()
        self.connection = connected(url, STALL_SECONDS)
        path = urllib.parse.urlunsplit(("", "", url.path or "/", url.query, ""))
        self.connection.request("GET", path, headers=headers)
        return self.connection.getresponse()

    def _redirected(self, url: urllib.parse.SplitResult, to: str) -> urllib.parse.SplitResult:
        following = urllib.parse.urlsplit(urllib.parse.urljoin(url.geturl(), to))
        is_same = (following.scheme, following.netloc) == (self._url.scheme, self._url.netloc)
        if following.scheme != "https" and not is_same:
            raise DataError(f"{self.shown_url}: redirects to a place that is not https://")
        return checked(following._replace(fragment="").geturl())

    def _require_the_rest(self, response: http.client.HTTPResponse) -> None:
        begun = header(response, "Content-Range").startswith(f"bytes {self.position}-")
        if response.status != 206 or not begun or not self._validator:
            raise DataError(
                f"{self.shown_url}: broke off at byte {self.position}, and the server does not send"
                " the rest alone"
            )

    def _learn(self, response: http.client.HTTPResponse) -> None:
        etag = header(response, "ETag")
        is_strong = etag and not etag.startswith("W/")
        self._validator = etag if is_strong else header(response, "Last-Modified")
        length = header(response, "Content-Length")
        self._length = int(length) if length.isascii() and length.isdecimal() else 0
