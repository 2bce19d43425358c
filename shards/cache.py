"""Keep fetched blocks on the node: one fetch per block for all its ranks, workers and runs.

    CachedSource ── BlockStore: is it here? ── no: ── source ── agrees with the index? ── kept

A block is the samples that begin within the same 4 MiB of a shard: whole samples, so that a block
can be verified by the index before it is stored. Its name has the digest of its shard: the same
bytes are the same block, from any server, file name or run; other bytes never are.
"""

import bisect
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rackrun.errors import DataError
from rackrun.shards.block_store import BlockStore
from rackrun.shards.index import Shard, index_bytes, is_manifest
from rackrun.shards.samples import sample_at
from rackrun.shards.source import Range, Source, Stored, verified
from rackrun.shards.traffic import Traffic

if TYPE_CHECKING:
    import numpy as np

_Bytes = TypeVar("_Bytes", bound=Stored)

CELL_BYTES = 4 << 20  # the samples that begin within the same ones make a block
_AHEAD = 2  # blocks that are made ready while one is used
ALL = slice(None)


class Block(NamedTuple):
    """A part of a shard that is stored as a unit: the samples of some rows of the index."""

    start: int  # bytes
    end: int
    rows: slice  # of the split's index

    @property
    def bytes(self) -> int:
        """Return the length of the block."""
        return self.end - self.start

    def key(self, shard: Shard) -> str:
        """Return the name of the block in a store."""
        return f"{shard.sha256}-{self.start}"


class CachedSource(Source):
    """A source whose blocks are stored in a folder of this machine, on a disk or in memory."""

    def __init__(self, source: Source, folder: str, limit_bytes: int) -> None:
        super().__init__(source.location, source, folder, limit_bytes)
        self.source = source
        self.folder = folder
        self.traffic = Traffic()
        self.store = BlockStore(Path(folder), limit_bytes)
        self._blocks: dict[str, list[Block]] = {}  # by the name of the shard

    def __reduce__(self) -> tuple[type[Source], tuple[Any, ...], Any]:
        kind, arguments, shared = super().__reduce__()
        return kind, arguments, shared and (shared, self.traffic.shared())

    def __setstate__(self, shared: Any) -> None:
        described, traffic = shared
        super().__setstate__(described)
        self.traffic.inherit(traffic)

    def stream(self, shard: Shard) -> Iterator[Stored]:
        """Yield the bytes of a shard in blocks; DataError at the end if size or digest is wrong."""
        try:
            blocks = ((shard, block.start, block.bytes) for block in self.blocks_of(shard))
            where = f"{self.location}: {shard.name}"
            yield from verified(_ahead(self.reread, blocks), shard, where)
        except DataError:
            # The damage may lie between samples, where no row of the index covers it.
            self.store.forget(shard.sha256)
            raise

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Yield each range in turn, while threads prepare the next ones."""
        return _ahead(self.read, ranges)

    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return exactly `length` bytes of a shard from `offset` on.

        What the cache has is not verified: readers hold it against the index, and may `reread` it.
        """
        return self._joined(partial(self.obtain, verify=False), shard, offset, length)

    def reread(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return the same, of blocks that agree with their checksums; others are fetched again."""
        return self._joined(partial(self.obtain, verify=True), shard, offset, length)

    def _joined(
        self, obtain: Callable[[Shard, Block, slice], Stored], shard: Shard, first: int, length: int
    ) -> Stored:
        parts = [obtain(shard, *part) for part in self.parts_of(shard, first, length)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def parts_of(self, shard: Shard, offset: int, length: int) -> list[tuple[Block, slice]]:
        """Return the blocks that a range lies in, each with the part of it."""
        blocks, end = self.blocks_of(shard), offset + length
        first = bisect.bisect_right(blocks, offset, key=lambda block: block.start) - 1
        last = bisect.bisect_left(blocks, end, key=lambda block: block.start)
        return [
            (block, slice(max(offset - block.start, 0), min(end, block.end) - block.start))
            for block in blocks[first:last]
        ]

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return a manifest from the source, or an index, which may be stored here."""
        if is_manifest(name):  # never stored: it has the digests of everything that is
            return self._counted(self.source.read_file(name, most_bytes))
        split = next(split for split in self.manifest.splits if split.index == name)
        length, digest = index_bytes(split.samples), split.index_sha256
        # By its digest alone: the same index is stored once, whatever its name or its folder's.
        data = self.store.get_or_fetch(
            digest,
            length,
            ALL,
            fetch=lambda: self._counted(self.source.read_file(name, most_bytes)),
            is_right=lambda data: hashlib.sha256(data).hexdigest() == digest,
        )
        return bytes(data)

    def keeps(self, shard: Shard, block: Block) -> bool:
        """Return True if this host stores the block when it has fetched it."""
        return True

    def obtain(self, shard: Shard, block: Block, part: slice, verify: bool = True) -> Stored:
        """Return a part of a block, from the store or fetched into it."""
        return self._kept(shard, block, part, lambda: self._fetch(shard, block, ALL), verify)

    def _kept(
        self, shard: Shard, block: Block, part: slice, fetch: Callable[[], Stored], verify: bool
    ) -> Stored:
        fetched: list[Stored] = []

        def fetch_now() -> Stored:
            fetched.append(fetch())
            return fetched[0]

        is_right = partial(self.is_right, shard, block)
        data = self.store.get_or_fetch(
            block.key(shard), block.bytes, part, fetch_now, is_right, verify
        )
        if not fetched:
            self.traffic.add("cache", len(data))
        return data

    def _fetch(self, shard: Shard, block: Block, part: slice) -> Stored:
        first, stop, _ = part.indices(block.bytes)
        return self._counted(self.source.read(shard, block.start + first, stop - first))

    def _counted(self, data: _Bytes) -> _Bytes:
        self.traffic.add("origin", len(data))
        return data

    def is_right(self, shard: Shard, block: Block, data: Stored) -> bool:
        """Return True if every sample of a block matches the index; readers report the others."""
        rows = self.index(self._split_of[shard.name])[block.rows]
        return self._match(shard, rows, block.start, data)

    def _match(self, shard: Shard, rows: "np.ndarray", start: int, data: Stored) -> bool:
        """Return True if `data`, from byte `start` of a shard on, has the samples of these rows."""
        try:
            for row in rows:
                sample_at(row, data, start, shard.name)
        except DataError:
            return False
        return True

    def blocks_of(self, shard: Shard) -> list[Block]:
        """Return the blocks that a shard consists of, the end of the archive with the last one."""
        if shard.name in self._blocks:
            return self._blocks[shard.name]
        import numpy as np

        split = self._split_of[shard.name]
        number = [each.name for each in self.manifest.split(split).shards].index(shard.name)
        index = self.index(split)
        low, high = np.searchsorted(index["shard"], [number, number + 1]).tolist()
        offsets = index["offset"][low:high]
        # A block begins with the first sample in each cell: where the number of the cell changes.
        firsts = np.flatnonzero(np.diff(offsets // CELL_BYTES, prepend=np.uint64(2**63)))
        rows = [*(firsts + low).tolist(), high]
        starts = [*offsets[firsts].tolist(), shard.bytes]
        self._blocks[shard.name] = [
            Block(start, end, slice(first, after))
            for (start, end), (first, after) in zip(pairwise(starts), pairwise(rows), strict=True)
        ]
        return self._blocks[shard.name]

    @cached_property
    def _split_of(self) -> dict[str, str]:  # by the name of a shard
        return {shard.name: split.name for split in self.manifest.splits for shard in split.shards}


def _ahead(read: Callable[..., Stored], ranges: Iterable[Range]) -> Iterator[Stored]:
    threads, waiting = ThreadPoolExecutor(_AHEAD), deque[Future[Stored]]()
    try:
        for byte_range in ranges:
            waiting.append(threads.submit(read, *byte_range))
            if len(waiting) > _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
