"""What every source of shards can do, whether it is a folder, a server or a cache.

    open_source(location) -> Source -> stream(shard): blocks of a whole tar
                                    -> read(shard, offset, length): one range of it
    samples(source, split, number) -> Sample, Sample, ...
    portions(source, wanted) -> the samples of some rows of the index

Every image is checked against its row in the index (key, label, CRC-32), every whole shard against
the digest in the manifest. Nothing is skipped silently: what does not fit is a DataError that names
the place, or a sample that carries it, for callers that count and continue.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from shards.index import Manifest, Shard

if TYPE_CHECKING:
    import numpy as np

BLOCK_BYTES = 4 << 20
Stored = bytes | bytearray | memoryview  # bytes of a tar
Range = tuple[Shard, int, int]  # offset and length


class Source(Protocol):
    """Where a shard folder is read from; cheap to pickle and to open again in another process."""

    location: str

    @property
    def manifest(self) -> Manifest:
        """The data set manifest."""

    def index(self, split: str) -> "np.ndarray":
        """The per-sample index of a split, verified against the manifest."""

    def stream(self, shard: Shard) -> Iterator[Stored]:
        """The bytes of a shard in blocks; DataError at the end if size or digest are wrong."""

    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Exactly `length` bytes of a shard from `offset` on."""

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Each range in turn, while the next ones are on their way."""
