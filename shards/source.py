"""Where a shard folder is read from: a folder, a server, or a cache over either.

    open_source(location) -> Source -> stream(shard): blocks of a whole tar
                                    -> read(shard, offset, length): one range of it
    samples(source, split, number) -> Sample, Sample, ...
    portions(source, requests) -> the samples of some rows of the index

Every image is verified by its row in the index (key, label, CRC-32), every whole shard by the
digest in the manifest. Nothing is skipped silently: a mismatch is a DataError that names the place,
or a sample with a fault, for callers that count and continue.

The processes of a host have one copy of an index: each maps the file, and verifies it. A pickled
source takes its manifest along, so that loader workers read the version that their rank reads.
"""

from __future__ import annotations

import hashlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from rackrun.contract.files import LARGEST_MANIFEST, MANIFEST_NAME
from rackrun.errors import DataError, Unavailable
from rackrun.shard_folder import folder_and_version
from rackrun.shards.index import (
    Manifest,
    Shard,
    Split,
    largest_index,
    parse_index,
    read_version,
)

if TYPE_CHECKING:
    import numpy as np

# Of a server, ranges in flight wait in the kernel: four of 4 MiB fall out of the CPU's cache before
# they are read, and cost a fifth more CPU time.
BLOCK_BYTES = 2 << 20

Stored = bytes | bytearray | memoryview  # bytes of a tar
Range = tuple[Shard, int, int]  # offset and length

_Content = TypeVar("_Content")


class Source(ABC):
    """A shard folder, wherever it is; cheap to pickle; any thread may use it.

    Manifest and indexes are read and verified on first use.
    """

    def __init__(self, location: str, *arguments: Any) -> None:
        """Keep the arguments that make another source like this one."""
        self.location = location
        self._arguments = arguments
        self._manifest: Manifest | None = None
        self._indexes: dict[str, np.ndarray] = {}  # by split

    def __reduce__(self) -> tuple[type[Source], tuple[Any, ...], Manifest | None]:
        return type(self), self._arguments, self._manifest

    def __setstate__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    @property
    def manifest(self) -> Manifest:
        """The manifest of the data set; a Problem if there is none."""
        if self._manifest is None:
            self._manifest = _asked_twice(self._read_manifest)
        return self._manifest

    def index(self, split: str) -> np.ndarray:
        """Return the per-sample index of a split, verified against the manifest."""
        if split not in self._indexes:
            part = self.manifest.split(split)
            again = iter((False, True))
            self._indexes[split] = _asked_twice(lambda: self._read_index(part, next(again)))
        return self._indexes[split]

    def index_data(self, part: Split, again: bool) -> bytes | mmap.mmap:
        """Return the bytes of an index as stored; `again`: the ones given before were wrong."""
        return self.read_file(part.index, largest_index(part.samples))

    def stream(self, shard: Shard) -> Iterator[Stored]:
        """Yield the bytes of a shard in blocks; DataError at the end if its digest is wrong."""
        digest = hashlib.sha256()
        starts = range(0, shard.bytes, BLOCK_BYTES)
        blocks = ((shard, start, min(BLOCK_BYTES, shard.bytes - start)) for start in starts)
        for block in self.reads(blocks):
            digest.update(block)
            yield block
        if digest.hexdigest() != shard.sha256:
            raise DataError(
                f"{self.location}: {shard.name}: damaged: its SHA-256 is not the one in the"
                " manifest"
            )

    @abstractmethod
    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return exactly `length` bytes of a shard from `offset` on."""

    def reread(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return the same after bytes that were wrong, from where they are surely right."""
        return self.read(shard, offset, length)

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Yield each range in turn, while the next ones are being fetched."""
        return (self.read(*byte_range) for byte_range in ranges)

    @abstractmethod
    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return the manifest or an index as stored; DataError for a larger file."""

    def _read_manifest(self) -> Manifest:
        folder, version = folder_and_version(self.location)
        text = self.read_file(MANIFEST_NAME, LARGEST_MANIFEST)
        newest = Manifest.parse(text, f"{folder.rstrip('/')}/{MANIFEST_NAME}")
        return read_version(newest, version or newest.number, self.read_file, folder)

    def _read_index(self, part: Split, again: bool) -> np.ndarray:
        return parse_index(self.index_data(part, again), self.manifest, part, self.location)


def _asked_twice(ask: Callable[[], _Content]) -> _Content:
    try:
        return ask()
    except Unavailable:
        raise
    except DataError:
        return ask()  # a bit may have flipped on the way
