"""The protocol of every source of shards: a folder, a server, or a cache over either.

    open_source(location) -> Source -> stream(shard): blocks of a whole tar
                                    -> read(shard, offset, length): one range of it
    samples(source, split, number) -> Sample, Sample, ...
    portions(source, requests) -> the samples of some rows of the index

Every image is verified by its row in the index (key, label, CRC-32), every whole shard by the
digest in the manifest. Nothing is skipped silently: a mismatch is a DataError that names the place,
or a sample with a fault, for callers that count and continue.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from shards.index import Manifest, Shard

if TYPE_CHECKING:
    import numpy as np

Stored = bytes | bytearray | memoryview  # bytes of a tar
Range = tuple[Shard, int, int]  # offset and length


class Source(Protocol):
    """Where a shard folder is read from; cheap to pickle; any thread may use it."""

    location: str

    @property
    def manifest(self) -> Manifest:
        """The manifest of the data set."""

    def index(self, split: str) -> "np.ndarray":
        """Return the per-sample index of a split, verified against the manifest."""

    def lend_index(self, split: str) -> tuple[int, int, int, int]:
        """Return where other processes of this machine can map the index, while this one has it."""

    def borrow_index(self, split: str, loan: tuple[int, int, int, int]) -> bool:
        """Use the index of another process; return False if its memory cannot be found."""

    def stream(self, shard: Shard) -> Iterator[Stored]:
        """Yield the bytes of a shard in blocks; DataError at the end if size or digest is wrong."""

    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return exactly `length` bytes of a shard from `offset` on."""

    def reread(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return the same after bytes that were wrong, from where they are surely right."""

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Yield each range in turn, while the next ones are being fetched."""

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return the manifest or an index as stored; raise DataError if it is larger."""
