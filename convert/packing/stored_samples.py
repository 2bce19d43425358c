"""The shards of a version of a folder, and the keys of their samples."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rackrun.shards.index import Shard
from rackrun.shards.samples import NAME_BYTES, key_in, sample_of
from rackrun.shards.source import Source
from rackrun.shards.writer import BLOCK


class StoredShard(NamedTuple):
    """A shard of a version of a folder, and its place in its split."""

    source: Source
    split: str
    number: int
    shard: Shard

    @property
    def where(self) -> str:
        """The shard as messages name it."""
        return f"{self.source.location}: {self.shard.name}"

    @property
    def rows(self) -> np.ndarray:
        """The rows of the index that are those of the shard."""
        rows = self.source.index(self.split)
        numbers = np.array([self.number, self.number + 1], rows["shard"].dtype)
        low, high = np.searchsorted(rows["shard"], numbers)
        return rows[low:high]

    def sample_keys(self) -> Iterator[str]:
        """Yield the keys of its samples, in the order of the rows; they stand in the tar."""
        rows = self.rows
        starts = [int(start) - BLOCK for start in rows["image_offset"]]
        headers = self.source.reads([(self.shard, start, BLOCK) for start in starts])
        for header, start, row in zip(headers, starts, rows, strict=True):
            if b"\0" in bytes(header[:NAME_BYTES]):
                yield key_in(bytes(header), self.where, start)
                continue
            # The name of the image fills its header: only the extended header before has all of it.
            data = self.source.read(self.shard, int(row["offset"]), int(row["length"]))
            yield sample_of(self.source, self.shard, row, data).key


def shards_of(source: Source) -> list[StoredShard]:
    """Return the shards of all splits of a version."""
    return [
        StoredShard(source, split.name, number, shard)
        for split in source.manifest.splits
        for number, shard in enumerate(split.shards)
    ]
