"""A shard folder on an HTTP server: every read is verified, and resumed where it breaks off.

    stream(shard), reads(ranges)    in order, several requested before the first is needed
      └── Fetch                     one range: requested, verified, resumed where it broke off
            └── ShardServer, Pool   persistent connections of one process to one server

Reading ahead needs no threads: the kernel receives the responses in the meantime.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from rackrun.errors import DataError
from rackrun.shard_folder import folder_and_version
from rackrun.shards.http.connection import Timeouts
from rackrun.shards.http.fetch import RANGE_BYTES, Fetch
from rackrun.shards.http.server import ShardServer
from rackrun.shards.index import Manifest, Shard
from rackrun.shards.source import Range, Source, Stored, verified

AHEAD = 2  # ranges requested while the first of them is being used


class HttpSource(Source):
    """A shard folder at an http(s):// URL."""

    def __init__(self, location: str, timeouts: Timeouts | None = None) -> None:
        folder, version = folder_and_version(location)
        self.server = ShardServer(folder, timeouts)
        named = f"{self.server.location}@{version}" if version else self.server.location
        super().__init__(named, named, self.server.timeouts)

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
        parts = (part for fetch in self._ahead(blocks) for part in fetch.parts())
        yield from verified(parts, shard, self.server.location + shard.name)

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Return an iterator over these ranges, while the next ones are being fetched."""
        return (fetch.finish() for fetch in self._ahead(ranges))

    def _ahead(self, ranges: Iterable[Range]) -> Iterator["Fetch"]:
        """Yield the fetch of each range in turn, once those of the next ranges have begun."""
        fetches: deque[Fetch] = deque()
        try:
            for shard, offset, length in ranges:
                fetches.append(Fetch(self.server, shard.name, offset, length, shard.bytes))
                fetches[-1].begin()
                if len(fetches) > AHEAD:
                    yield fetches.popleft()
            while fetches:
                yield fetches.popleft()
        finally:
            for fetch in fetches:
                fetch.drop()

    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return exactly `length` bytes of a shard from `offset` on."""
        return Fetch(self.server, shard.name, offset, length, shard.bytes).finish()

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return a file of unknown size; raise DataError if it is larger than allowed."""
        return b"".join(self.file(name, most_bytes))

    def file(self, name: str, most_bytes: int) -> Iterator[Stored]:
        """Yield a file of unknown size in parts."""
        return Fetch(self.server, name, 0, None, None, most_bytes).parts()
