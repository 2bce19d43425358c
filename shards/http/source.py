"""A shard folder on an HTTP server, read so that nothing is lost and nothing wrong gets in.

    stream(shard), reads(ranges)    in order, several asked for before the first is needed
      └── Fetch                     one range: asked for, checked, resumed where it broke
            └── Pool                kept connections, of one process to one server

Reading ahead needs no threads: the kernel receives what was asked for while we do other things.

A server in trouble (no connection, a reset, a stall, 429, 5xx) is asked again for what is missing
until `Patience` is at an end. An answer that cannot be right (404, another file than before, other
bytes than were asked for) is asked for once more, over another connection; the second one is a
DataError. Every error names URL, byte and status.
"""

import http.client
import logging
import os
import random
import ssl
import time
import urllib.parse
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from rackrun.errors import Unavailable, UsageError
from shards.http import auth
from shards.http.connection import Connection, Patience, Pool
from shards.http.response import Answer, decoded, moved, sendable
from shards.index import LARGEST_MANIFEST, MANIFEST_NAME, Manifest, Shard, Split, largest_index
from shards.metadata import Metadata, asked_twice
from shards.source import Range, Stored
from shards.verify import verified

if TYPE_CHECKING:
    import numpy as np

# What is on its way lies in the kernel meanwhile: 4 times 4 MiB fall out of a processor's cache
# before they are read, and cost a fifth more of its time.
BLOCK_BYTES = 2 << 20
AHEAD = 2  # ranges that are on their way while the first of them is being used
SLICE_BYTES = 1 << 20  # the most that is fetched twice where an answer breaks off
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
SILENT_TROUBLES = 2  # these happen; after more of them in a row we say why it takes so long

MOST_MOVES = 3
EXAMPLE = "http://HOST:PORT/"
PATH_LETTERS = "/%:@!$&'()*+,;=~"  # what a path may hold as it is (RFC 3986)

TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
REDIRECTS = {301, 302, 303, 307, 308}
HINTS = {
    401: f"; put user:password into a file and type: export {auth.CREDENTIALS}=FILE",
    403: f"; the server asks for a certificate? type: export {auth.CERTIFICATE}=FILE",
    404: "; is this the folder that the converter made, served whole?",
}
ANSWERED: set[str] = set()  # servers that this process, or the one it parted from, has heard of

log = logging.getLogger(__name__)
dice = random.SystemRandom()  # ranks seed the global one alike, and would all come back at once


class HttpSource:
    """A shard folder at an http(s):// URL."""

    def __init__(self, location: str, patience: Patience | None = None) -> None:
        self.location = location.rstrip("/") + "/"
        self.patience = patience or Patience()
        self.troubles = 0  # answers that broke off or did not come, and were asked for again
        self.etags: dict[str, str] = {}  # of every file, as it was when we first saw it
        self.url = _checked(self.location)
        self._whole: set[str] = set()  # shards whose digest was right
        self._known = Metadata()
        self._pools: dict[int, Pool] = {}

    def __reduce__(self) -> tuple[type["HttpSource"], tuple[str, Patience], dict[str, Metadata]]:
        return HttpSource, (self.location, self.patience), {"_known": self._known}

    @property
    def manifest(self) -> Manifest:
        """The data set manifest; DataError if the server has none."""
        if not self._known.manifest:
            self._known.manifest = asked_twice(self._read_manifest)
        return self._known.manifest

    def index(self, split: str) -> "np.ndarray":
        """The per-sample index of a split, verified against the manifest."""
        return self._known.index(self.manifest, split, self.location, self._index_file)

    def stream(self, shard: Shard) -> Iterator[Stored]:
        """The bytes of a shard in small blocks; DataError at the end if its digest is wrong.

        The digest is held against the bytes once in the life of this source. As long as the
        server then calls the file the same, reading it again costs no more than its samples'
        checksums.
        """
        starts = range(0, shard.bytes, BLOCK_BYTES)
        blocks = ((shard, start, min(BLOCK_BYTES, shard.bytes - start)) for start in starts)
        parts = (part for fetch in self._ahead(blocks) for part in fetch.parts())
        if shard.name in self._whole:
            yield from parts
        else:
            yield from verified(parts, shard, self.location + shard.name)
            if shard.name in self.etags:  # without one, another file could take its place unseen
                self._whole.add(shard.name)

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Each range (shard, offset, length) in turn, while the next ones are on their way."""
        return (fetch.finish() for fetch in self._ahead(ranges))

    def _ahead(self, ranges: Iterable[Range]) -> Iterator["Fetch"]:
        """Each range's fetch in turn, when those of the next ones have begun."""
        fetches: deque[Fetch] = deque()
        try:
            for shard, offset, length in ranges:
                fetches.append(Fetch(self, shard.name, offset, length, shard.bytes))
                fetches[-1].begin()
                if len(fetches) > AHEAD:
                    yield fetches.popleft()
            while fetches:
                yield fetches.popleft()
        finally:
            for fetch in fetches:
                fetch.drop()

    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Exactly `length` bytes of a shard from `offset` on."""
        return Fetch(self, shard.name, offset, length, shard.bytes).finish()

    def _read_manifest(self) -> Manifest:
        text = self._whole_file(MANIFEST_NAME, LARGEST_MANIFEST)
        return Manifest.parse(text, self.location + MANIFEST_NAME)

    def _index_file(self, part: Split) -> bytes:
        return self._whole_file(part.index, largest_index(part.samples))

    def _whole_file(self, name: str, most_bytes: int) -> bytes:
        """A file whose size only the server knows; DataError for a larger one."""
        return b"".join(Fetch(self, name, 0, None, None, most_bytes).parts())

    @property
    def pool(self) -> Pool:
        """The connections of this process: after a fork, the child makes its own."""
        process = os.getpid()
        if process not in self._pools:
            context = auth.context() if self.url.scheme == "https" else None
            self._pools[process] = Pool(*_host_and_port(self.url), context, self.patience)
        return self._pools[process]

    @cached_property
    def headers(self) -> dict[str, str]:
        """What every request says: who we are, and that bytes are wanted as they are."""
        secret = auth.authorization(self.url.hostname or "", self.url.scheme == "https")
        return {"Accept-Encoding": "identity", **secret}


def _checked(location: str) -> urllib.parse.SplitResult:
    """The parts of a URL; UsageError for one that cannot be that of a folder."""
    try:
        url = urllib.parse.urlsplit(location)
    except ValueError:
        raise UsageError(f"{location}: not the URL of a folder, as in {EXAMPLE}") from None
    if url.username is not None:
        raise UsageError(
            f"{url.scheme}://…@{url.hostname}: passwords in URLs end up in logs; put user:password"
            f" into a file and type: export {auth.CREDENTIALS}=FILE"
        )
    try:
        whole = bool(url.hostname and url.hostname.encode("idna")) and url.port != 0
    except ValueError:  # a port that is none, a name that cannot be one
        whole = False
    if not whole or url.query or url.fragment or url.scheme not in ("http", "https"):
        raise UsageError(f"{location}: not the URL of a folder, as in {EXAMPLE}")
    return url


def _host_and_port(url: urllib.parse.SplitResult) -> tuple[str, int]:
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


class Trouble(Exception):
    """Something that may be over when the server is asked again."""

    def __init__(self, what: str, pause_seconds: float = 0.0) -> None:
        super().__init__(what)
        self.pause_seconds = pause_seconds  # as the server wishes


class Retries:
    """When to ask again: ever later, never all at once, not before the server wishes it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.troubles = 0  # since something last arrived

    def pause(self, wished_seconds: float) -> bool:
        """Wait before asking again; False, at once, if the time would be up by then."""
        self.troubles += 1
        longest = min(FIRST_PAUSE_SECONDS * 2 ** (self.troubles - 1), LONGEST_PAUSE_SECONDS)
        seconds = wished_seconds + dice.uniform(0, longest)
        if time.monotonic() + seconds > self.deadline:
            return False
        time.sleep(seconds)
        return True


class Fetch:
    """One range of a file: asked for ahead of time, and asked for again where it breaks off.

    `length` None is for a whole file of a size that only the server knows, up to `most_bytes`;
    `total` is the size of the file where we know it.
    """

    def __init__(
        self,
        source: HttpSource,
        name: str,
        offset: int,
        length: int | None,
        total: int | None,
        most_bytes: int = 0,
    ) -> None:
        self._source = source
        self._name = name
        self._home = urllib.parse.quote(source.url.path, safe=PATH_LETTERS) + name
        self._path = self._home  # until the server says that it has moved
        self._next = offset  # the first byte that we do not have
        self._end = None if length is None else offset + length
        self._total = total
        self._most_bytes = most_bytes
        self._moves = 0
        self._wrongs = 0  # answers that could not be right
        self._connection: Connection | None = None
        self._room: memoryview | None = None  # where the next bytes go, if they are to lie together

    def begin(self) -> None:
        """Put the request on the wire. What goes wrong here is seen, and mended, by `finish`."""
        try:
            self._ask()
        except (OSError, http.client.HTTPException):
            self.drop()

    def finish(self) -> memoryview:
        """The bytes, of the right place of the right file, and all of them; else DataError."""
        import numpy as np  # its memory is not wiped first, as a bytearray's is

        assert self._end is not None
        self._room = together = np.empty(self._end - self._next, np.uint8).data
        for _ in self.parts():
            pass
        return together

    def parts(self) -> Iterator[Stored]:
        """The same as they come, in parts of at most 1 MiB."""
        retries = Retries(self._seconds())
        try:
            while self._next != self._end:
                held = self._next
                try:
                    yield from self._receive(retries)
                except ssl.SSLCertVerificationError as error:
                    raise self._error(_no_trust(error)) from None
                except (OSError, http.client.HTTPException, Trouble) as trouble:
                    if self._next > held:
                        retries.troubles = 0
                    self._retry(retries, trouble)
        finally:
            self.drop()

    def drop(self) -> None:
        """Give up what is on its way."""
        if self._connection:
            self._connection.close()
            self._connection = None

    def _seconds(self) -> float:
        patience = self._source.patience
        if self._source.location not in ANSWERED:
            return patience.first_seconds
        blocks = ((self._end or 0) - self._next) / BLOCK_BYTES
        return patience.total_seconds * max(1.0, blocks)

    def _retry(self, retries: Retries, trouble: Exception) -> None:
        """Make ready to ask again, after a pause; DataError when the time is up."""
        self.drop()
        self._source.pool.forget()  # what was kept is as old as what has just broken
        self._source.troubles += 1
        what = " ".join(str(getattr(trouble, "strerror", None) or trouble).split())
        if retries.troubles == SILENT_TROUBLES:
            log.warning("%s: byte %d: %s; asking again", self._url, self._next, what)
        if not retries.pause(getattr(trouble, "pause_seconds", 0.0)):
            raise self._error(f"{what}; gave up after {retries.seconds:g} s") from trouble

    def _ask(self) -> None:
        """Send the request for what is missing."""
        last = "" if self._end is None else self._end - 1
        headers = {"Range": f"bytes={self._next}-{last}", **self._source.headers}
        known = self._source.etags.get(self._name, "")
        if sendable(known):  # a weak one says only that the files look alike
            headers["If-Range"] = known
        self._connection = self._source.pool.take()
        self._connection.request("GET", self._path, headers=headers)

    def _receive(self, retries: Retries) -> Iterator[Stored]:
        """The answer as far as it goes; Trouble, OSError or HTTPException where it breaks off."""
        if not self._connection:
            self._ask()
        assert self._connection
        self._connection.wait_until(retries.deadline)
        response = self._connection.getresponse()
        ANSWERED.add(self._source.location)
        answer = decoded(response)
        self._judge_status(answer)
        part = self._part(response)  # first: a head that broke off looks like one that is wrong
        self._judge_range(answer)
        self._judge_identity(answer)
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
        self._free(response)

    def _free(self, response: http.client.HTTPResponse) -> None:
        """Give the connection back, if nothing more is to come over it."""
        assert self._connection
        if response.isclosed():
            self._source.pool.give(self._connection)
        else:
            self._connection.close()
        self._connection = None

    def _part(self, response: http.client.HTTPResponse) -> Stored:
        """The next bytes of the answer."""
        missing = SLICE_BYTES if self._end is None else self._end - self._next
        size = min(SLICE_BYTES, missing)
        part: Stored
        if self._room is None:
            part = response.read(size)
        else:
            part = self._room[: response.readinto(self._room[:size])]
        if not part:
            raise Trouble("the answer broke off")
        return part

    def _judge_status(self, answer: Answer) -> None:
        """Return for a part of a file; Trouble if asking again may help, else DataError."""
        if answer.status in TRANSIENT:
            raise Trouble(answer.words, answer.pause_seconds)
        if answer.status in REDIRECTS:
            raise self._move(answer)
        if answer.status == 200 and answer.kind == "text/html":
            raise self._wrong(
                f"{answer.words}: a page, and no part of a data set; does a portal or another"
                " server answer here?"
            )
        if answer.status == 200 and self._name in self._source.etags:
            raise self._wrong(f"{answer.words}: not the file any more that was there before")
        if answer.status == 200:
            raise self._wrong(
                f"{answer.words}: the server sends no ranges; type: python -m nginx FOLDER"
            )
        if answer.status != 206:
            raise self._wrong(answer.words + HINTS.get(answer.status, ""))

    def _judge_range(self, answer: Answer) -> None:
        """DataError unless these are the bytes that were asked for, of a file of the right size."""
        if not answer.range:
            said = answer.range_text or "no Content-Range"
            raise self._wrong(f"{answer.words}, but of no range ({said})")
        first, last, total = answer.range
        if self._total not in (None, total):
            raise self._wrong(f"{answer.words}: {total} bytes long there, and not {self._total}")
        if self._end is None and total > self._most_bytes:
            raise self._wrong(f"{answer.words}: {total} bytes are too many for such a file")
        end = total if self._end is None else self._end
        if (first, last) != (self._next, end - 1):
            raise self._wrong(f"{answer.words}, but of bytes {first} to {last}, up to {end}")
        if answer.length not in ("", str(last - first + 1)):
            raise self._wrong(
                f"{answer.words}: {answer.length} bytes announced for {answer.range_text}"
            )
        self._total, self._end = total, end

    def _judge_identity(self, answer: Answer) -> None:
        """DataError unless it is the file of before, as it lies on the server."""
        if answer.encoding != "identity":
            raise self._wrong(f"{answer.words}: sent as {answer.encoding}, which nobody asked for")
        known = (
            self._source.etags.setdefault(self._name, answer.identity) if answer.identity else ""
        )
        if known != answer.identity:
            raise self._wrong(f"{answer.words}: not the file any more that was there before")

    def _move(self, answer: Answer) -> Exception:
        """Follow a redirect on the same server; an error for one that leads elsewhere."""
        path = moved(self._url, answer.location)
        self._moves += 1
        if path is None or self._moves > MOST_MOVES:
            where = answer.location or "nowhere"
            return self._wrong(f"{answer.words} to {where}, which is not followed")
        self._path = path
        return Trouble(f"{answer.words} to {answer.location}")

    def _wrong(self, what: str) -> Exception:
        """For an answer that cannot be right: bytes on a wire may be wrong once, and not twice."""
        self._wrongs += 1
        self._path = self._home
        return Trouble(what) if self._wrongs == 1 else self._error(what)

    @property
    def _url(self) -> str:
        return self._source.location + self._name

    def _error(self, what: str) -> Unavailable:
        return Unavailable(f"{self._url}: byte {self._next}: {what}")


def _no_trust(error: ssl.SSLCertVerificationError) -> str:
    return f"not to be trusted: {error.verify_message}; type: export {auth.AUTHORITY}=FILE"
