"""A cached source that asks the home of a block, another host of the run, before the origin.

    read ── own cache ── no: ── the block's home ── of no help: ── the origin

A host keeps the blocks whose home it is; every one, if its cache has room for the whole data set.
What another host sends is believed as little as what a server sends. Readers hold every sample
against its row in the index; where one does not fit, they `reread`: the home looks at its block
again, and if that does not help, it is left alone, and the bytes come from the origin.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rackrun.shards.block_store import SPARE
from rackrun.shards.cache import ALL, CELL_BYTES, Block, CachedSource
from rackrun.shards.index import Shard, index_bytes
from rackrun.shards.peers.client import Peer, PeerClient, PeerTimeouts
from rackrun.shards.peers.homes import NOWHERE, homes
from rackrun.shards.peers.protocol import Request
from rackrun.shards.source import Source, Stored


class PeerTable(NamedTuple):
    """The hosts of a run, as one of them sees them."""

    token: bytes
    peers: tuple[Peer, ...]
    this_host: str
    """The identity of this host."""
    timeouts: PeerTimeouts = PeerTimeouts()


class Homes(NamedTuple):
    """Where the blocks of a data set are kept."""

    by_shard: dict[str, npt.NDArray[np.int16]]
    keeps_all: bool
    """Whether every host has room for all blocks."""


class PeerSource(CachedSource):
    """A source whose blocks are stored by the hosts of a run together; without a table, alone."""

    def __init__(
        self,
        source: Source,
        folder: str,
        limit_bytes: int,
        table: PeerTable | None = None,
        block_homes: Homes | None = None,
    ) -> None:
        super().__init__(source, folder, limit_bytes)
        self._peers: Sequence[Peer] = ()
        if table and block_homes:
            self._use(table, block_homes)

    def join(self, table: PeerTable, share: float) -> None:
        """Read by these hosts from now on, with this share of each one's cache."""
        shards = {shard.sha256: shard for split in self.manifest.splits for shard in split.shards}
        indexes = sum(index_bytes(split.samples) for split in self.manifest.splits)
        limit = int(self.store.limit_bytes * (1 - SPARE) * share) - indexes
        names = sorted({peer.identity for peer in table.peers})
        by_shard = homes(names, shards.values(), CELL_BYTES, limit)
        total = sum(shard.bytes for shard in shards.values())
        self._use(table, Homes(by_shard, keeps_all=total <= limit))

    def _use(self, table: PeerTable, block_homes: Homes) -> None:
        self._arguments = (*self._arguments[:3], table, block_homes)
        by_identity = {peer.identity: peer for peer in table.peers}
        self._peers = [by_identity[name] for name in sorted(by_identity)]
        self._index = next(
            n for n, peer in enumerate(self._peers) if peer.identity == table.this_host
        )
        self._homes = block_homes
        self._client = PeerClient(table.token, self._peers, table.timeouts)

    def keeps(self, shard: Shard, block: Block) -> bool:
        """Return True if this host stores the block."""
        return not self._peers or self._homes.keeps_all or self._home(shard, block) == self._index

    def _home(self, shard: Shard, block: Block) -> int:
        return int(self._homes.by_shard[shard.sha256][block.start // CELL_BYTES])

    def stream(self, shard: Shard) -> Iterator[Stored]:
        """Yield the bytes of a shard in blocks: of the source, where hosts share their caches.

        No row of the index covers what lies between samples, by which a host could be judged.
        """
        return self.source.stream(shard) if self._peers else super().stream(shard)

    def obtain(self, shard: Shard, block: Block, part: slice, verify: bool = True) -> Stored:
        """Return a part of a block: from the store, its home, or the source."""
        if not self._peers or (home := self._home(shard, block)) == self._index:
            return super().obtain(shard, block, part, verify)
        if self._homes.keeps_all:
            fetch = partial(self._asked, home, shard, block, ALL)
            return self._kept(shard, block, part, fetch, verify)
        data = self.store.load(block.key(shard), block.bytes, part, verify)  # from another run
        if data is not None:
            self.traffic.add("cache", len(data))
            return data
        return self._asked(home, shard, block, part)

    def reread(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return the same after bytes that were wrong; leave the host alone that sends them."""
        if not self._peers:
            return super().reread(shard, offset, length)
        return self._joined(self._obtain_right, shard, offset, length)

    def _obtain_right(self, shard: Shard, block: Block, part: slice) -> Stored:
        """Return a part of a block from its home, if that can be verified, or from the source."""
        home = self._home(shard, block)
        if home == self._index:
            return super().obtain(shard, block, part)
        kept = self.store.load(block.key(shard), block.bytes, part)  # removed, if it was wrong
        if kept is not None:
            return kept
        rows, span = self._whole_samples(shard, block, part)
        data = self._ask(home, shard, block, span, verify=True)
        if data is not None and self._match(shard, rows, block.start + span.start, data):
            return data[part.start - span.start : part.stop - span.start]
        if data is not None:
            self._client.leave_alone(home, "it sends bytes that are not those of the index")
        return self._fetch(shard, block, part)

    def _asked(self, home: int, shard: Shard, block: Block, part: slice) -> Stored:
        data = self._ask(home, shard, block, part)
        return self._fetch(shard, block, part) if data is None else data

    def _ask(
        self, home: int, shard: Shard, block: Block, part: slice, verify: bool = False
    ) -> memoryview | None:
        """Return what a host has of a block, which is not verified; None if it is of no help."""
        first, stop, _ = part.indices(block.bytes)
        if home == NOWHERE or first == stop:
            return None
        request = Request(shard.sha256, block.start + first, stop - first, verify)
        data = self._client.ask(home, request)
        if data is not None:
            self.traffic.add("peers", len(data))
        return data

    def _whole_samples(
        self, shard: Shard, block: Block, part: slice
    ) -> tuple[npt.NDArray[np.void], slice]:
        """Return the samples that a part of a block touches, and where in the block they lie.

        Only whole samples can be held against the index.
        """
        rows = self.index(self._split_of[shard.name])[block.rows]
        offsets = rows["offset"] - np.uint64(block.start)
        low = max(int(np.searchsorted(offsets, part.start, side="right")) - 1, 0)
        high = int(np.searchsorted(offsets, part.stop))
        end = int(offsets[high]) if high < len(rows) else block.bytes
        return rows[low:high], slice(int(offsets[low]), end)
