"""Tars without an index as streams: a file, a URL, or what a command prints.

    with opened(tar) as stream: stream.read(size)

A response that breaks off is continued where the server can send parts of the same file. Redirects
are followed to https:// or the same server, without credentials.
"""

from __future__ import annotations

import http.client
import ssl
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from rackrun.contract import variables
from rackrun.data_location import PIPE, WEB
from rackrun.errors import DataError, Unavailable
from rackrun.shards.credentials import authorization, tls_context
from rackrun.shards.http_answer import Answer
from rackrun.terminal import one_line

PAUSES_SECONDS = (0.2, 1.0, 5.0, 15.0, 30.0)  # before the same bytes are requested again
STALL_SECONDS = 30.0
END_SECONDS = 1.0  # for a command to end after its output
TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
REST_BYTES = 1 << 20  # at once, of what a command prints and nobody needs


class Stream(Protocol):
    """A tar that is read once, from the beginning."""

    def read(self, size: int, /) -> bytes:
        """Return up to so many bytes; none at the end."""


@contextmanager
def opened(tar: str) -> Iterator[Stream]:
    """Open a tar for reading; DataError if that fails, or if it breaks off."""
    if tar.startswith(PIPE):
        with _printed(tar) as output:
            yield output
    elif tar.startswith(WEB):
        with closing(_Response(tar)) as response:
            yield response
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


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = 5

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        is_same = (old.scheme, old.netloc) == (new.scheme, new.netloc)
        if new.scheme != "https" and not is_same:
            raise DataError(f"{req.full_url}: redirects to a place that is not https://")
        fp.close()  # its body would be read whole
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request and is_same:
            request.unredirected_hdrs.update(req.unredirected_hdrs)
        return request


class _Http(http.client.HTTPConnection):
    response_class = Answer  # which notices a server that sends hardly anything


class _Https(http.client.HTTPSConnection):
    response_class = Answer


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Http, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Https, req, context=tls_context())


class _Response:
    """A tar on a server; reads go on where a response broke off."""

    def __init__(self, url: str) -> None:
        self._url = url
        where = urllib.parse.urlsplit(url)
        # Not sent to where a redirect leads.
        self._secret = authorization(where.hostname or "", where.scheme == "https")
        self._opener = urllib.request.build_opener(_Redirects(), _HttpHandler(), _HttpsHandler())
        self._response: http.client.HTTPResponse | None = None
        self._position = 0
        self._length: int | None = None
        self._validator = ""  # of the file whose first bytes are here

    def read(self, size: int) -> bytes:
        """Return up to so many bytes; none at the end."""
        trouble: Exception | None = None
        for pause in (0.0, *PAUSES_SECONDS):
            time.sleep(pause)
            try:
                if self._response is None:
                    self._response = self._asked()
                data = self._response.read(size)
                if data or self._length in (None, self._position):
                    self._position += len(data)
                    return data
                raise OSError("the response broke off")
            except urllib.error.HTTPError as error:
                error.close()
                if error.code not in TRANSIENT:
                    raise DataError(f"{self._url}: status {error.code}") from None
                trouble = OSError(f"status {error.code}")
            except (OSError, http.client.HTTPException) as error:
                trouble = error
                if isinstance(
                    reason := getattr(error, "reason", None), ssl.SSLCertVerificationError
                ):
                    hint = f"type: export {variables.AUTHORITY}=FILE"  # no later try would help
                    raise Unavailable(f"{self._url}: {one_line(str(reason))}; {hint}") from None
            self.close()
        why = one_line(str(getattr(trouble, "reason", None) or trouble))[:200]
        raise Unavailable(f"{self._url}: byte {self._position}: {why}")

    def close(self) -> None:
        """Close the connection."""
        if self._response:
            self._response.close()
            self._response = None

    def _asked(self) -> http.client.HTTPResponse:
        headers = {"Accept-Encoding": "identity"}
        request = urllib.request.Request(self._url, headers=headers)  # noqa: S310  # http(s)://
        for name, value in self._secret.items():
            request.add_unredirected_header(name, value)
        if self._position:
            request.add_header("Range", f"bytes={self._position}-")
            request.add_header("If-Range", self._validator)
        response: http.client.HTTPResponse = self._opener.open(request, timeout=STALL_SECONDS)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise DataError(f"{self._url}: the server compresses it")
        if self._position:
            begun = response.headers.get("Content-Range", "").startswith(f"bytes {self._position}-")
            if response.status != 206 or not begun or not self._validator:
                response.close()
                raise Unavailable(
                    f"{self._url}: broke off at byte {self._position}, and the server does not send"
                    " the rest alone"
                )
            return response
        etag = response.headers.get("ETag", "")
        weak = etag.startswith("W/")
        self._validator = response.headers.get("Last-Modified", "") if weak or not etag else etag
        with suppress(ValueError):
            self._length = int(response.headers.get("Content-Length", ""))
        return response
