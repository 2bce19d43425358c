"""Read shards from a cache folder of this host once they are complete there, else from the origin.

FOLDER/rackrun-cache-UID/ID/          locked by every run that reads the data set; its time is that
                                      of the last use
FOLDER/rackrun-cache-UID/ID/SHA.tar   a whole shard, named by its SHA-256

ID is the digest of the first version, so versions share the shards that they share. Shards are
fetched by `shards.cache_filler`. Whatever brought the bytes, each image is verified by its row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rackrun.errors import DataError
from rackrun.shards.folder import FolderSource
from rackrun.shards.host_folder import Bytes, own_folder
from rackrun.shards.source import Range, Source, Stored

if TYPE_CHECKING:
    from rackrun.shards.index import Manifest, Shard, Split

ID_LETTERS = 32  # of a digest


class CachedSource(Source):
    """A source whose shards may lie in a folder of this host."""

    def __init__(self, origin: Source, folder: str) -> None:
        super().__init__(origin.location, origin, folder)
        self.origin = origin
        self.own_folder = own_folder(Path(folder))

    @property
    def manifest(self) -> Manifest:
        """The manifest, which is never kept: it has the digests of everything that is."""
        return self.origin.manifest

    @cached_property
    def shard_folder(self) -> Path:
        """Where the shards of this data set are kept."""
        return self.own_folder / self.manifest.lineage[:ID_LETTERS]

    def path(self, shard: Shard) -> Path:
        """Return where a shard is kept; the file is there only once it is whole."""
        return self.shard_folder / f"{shard.sha256}.tar"

    def has(self, shard: Shard) -> bool:
        """Return True if a shard is here, by its size: a power cut may leave an empty file."""
        try:
            return self.path(shard).stat().st_size == shard.bytes
        except OSError:
            return False

    def stream(self, shard: Shard) -> Iterator[Stored]:
        """Yield the bytes of a shard in blocks; DataError at the end if its digest is wrong."""
        if not self.has(shard):
            yield from self.origin.stream(shard)
            return
        try:
            yield from super().stream(shard)
        except DataError:
            self._forget(shard)
            raise

    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return exactly `length` bytes of a shard from `offset` on."""
        if self.has(shard):
            with suppress(DataError):  # it has gone meanwhile, or the disk is damaged
                return FolderSource.part(self.path(shard), shard, offset, length)
        return self.origin.read(shard, offset, length)

    def reread(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return the same from the origin: what was kept here is damaged, and is forgotten."""
        self._forget(shard)
        return self.origin.reread(shard, offset, length)

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Yield each range in turn; those of the origin are fetched ahead."""
        for is_here, group in groupby(ranges, lambda each: self.has(each[0])):
            if is_here:
                yield from (self.read(*each) for each in group)
            else:
                yield from self.origin.reads(group)

    def index_data(self, part: Split, again: bool) -> Bytes:
        """Return the bytes of an index from the origin."""
        return self.origin.index_data(part, again)

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return the manifest or an index from the origin."""
        return self.origin.read_file(name, most_bytes)

    def _forget(self, shard: Shard) -> None:
        with suppress(OSError):  # it has gone meanwhile, or the disk is read-only after an error
            self.path(shard).unlink()
