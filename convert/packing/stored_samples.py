"""The samples of a shard folder as a source of records, to be copied as they are stored.

A sample is one range of bytes of its tar, whatever members it has. Only its class may be written
anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from convert.packing.stored_label import has_number, opened, relabelled
from convert.packing.workers import in_parallel, working_on
from convert.progress import Progress, meter
from convert.readers.records import Record
from convert.readers.webdataset_tars import LABEL_FIELD
from shards.index import Manifest, Origin, Row, Shard
from shards.samples import key_in, sample_of
from shards.source import Source
from shards.writer import BLOCK

if TYPE_CHECKING:
    import numpy as np

NAME_BYTES = 100  # of a header


class StoredShard(NamedTuple):
    """A shard and its place in its split."""

    split: str
    number: int
    shard: Shard


class ShardKeys(NamedTuple):
    """The keys of a shard's samples, in order."""

    stored: StoredShard
    keys: list[str]


def shards_of(manifest: Manifest) -> list[StoredShard]:
    """Return the shards of all splits."""
    return [
        StoredShard(split.name, number, shard)
        for split in manifest.splits
        for number, shard in enumerate(split.shards)
    ]


def rows_of(source: Source, stored: StoredShard) -> np.ndarray:
    """Return the rows of the index that are those of a shard."""
    import numpy as np

    rows = source.index(stored.split)
    low, high = np.searchsorted(rows["shard"], [stored.number, stored.number + 1])
    return rows[low:high]


def keys_of(shards: Sequence[tuple[Source, StoredShard]], workers: int) -> dict[str, ShardKeys]:
    """Return the keys of the samples of shards, by the shard's name, read side by side."""

    def read(job: int, report: Callable[[ShardKeys], None]) -> None:
        source, stored = shards[job]
        where = f"{source.location}: {stored.shard.name}"
        working_on(where)
        rows = rows_of(source, stored)
        starts = [int(start) - BLOCK for start in rows["image_offset"]]
        headers = source.reads([(stored.shard, start, BLOCK) for start in starts])
        keys = [
            key_in(bytes(header), where, start)
            if b"\0" in bytes(header[:NAME_BYTES])
            else _long_key(source, stored.shard, row)
            for header, start, row in zip(headers, starts, rows, strict=True)
        ]
        report(ShardKeys(stored, keys))

    for source, stored in shards:
        source.index(stored.split)  # read here, it is there for all workers
    keys: dict[str, ShardKeys] = {}
    total = sum(stored.shard.samples for _, stored in shards)
    steps = in_parallel(range(len(shards)), read, workers)
    with closing(steps), meter("read the names of", total, "samples") as shown:
        for result in steps:
            keys[result.stored.shard.name] = result
            shown.advance(Progress(len(result.keys), 0))
    return keys


def _long_key(source: Source, shard: Shard, row: Any) -> str:
    """Return the key of a sample whose image has a longer name than its header has room for."""
    start = int(row["offset"])
    members = bytes(source.read(shard, start, int(row["length"])))
    with opened(Row(*row.item()), members, f"{source.location}: {shard.name}") as (_, sample):
        return sample.key if sample else ""


class StoredSamples:
    """A version of a shard folder as a container; a record's name is SHARD/KEY.

    `label_field` is that of .json members with the class, in tars of other programs.
    """

    def __init__(self, source: Source, label_field: str = LABEL_FIELD) -> None:
        self.source, self._label_field = source, label_field
        self._shards = {stored.shard.name: stored for stored in shards_of(source.manifest)}

    def origin(self) -> Origin:
        """Return the version as an entry of a manifest."""
        size = sum(stored.shard.bytes for stored in self._shards.values())
        return Origin(self.source.manifest.dataset, size, self.source.manifest.digest)

    def records(
        self, keys: Mapping[str, ShardKeys], labels: Mapping[str, int | None]
    ) -> Iterator[Record]:
        """Yield a record per sample; `labels` has new ones by name, None for what is left out."""
        for name, (stored, shard_keys) in keys.items():
            rows = rows_of(self.source, stored)
            for key, row in zip(shard_keys, rows, strict=True):
                record_name = f"{name}/{key}"
                label = labels.get(record_name, int(row["label"]))
                if label is None:
                    continue
                offset, length = int(row["offset"]), int(row["length"])
                yield Record(key, label, stored.split, record_name, 0, offset, length, length)

    def read(self, record: Record) -> bytes:
        """Return the members of a sample, verified, as its tar has them."""
        return self._read(record)[1]

    def labelled(self, record: Record) -> tuple[Row, bytes]:
        """Return a sample's row and members with the label of its record; DataError if damaged."""
        row, members = self._read(record)
        if row.label == record.label:
            return row, members
        where, classes = f"{self.source.location}: {record.name}", self.source.manifest.classes
        return relabelled(row, members, record.label, classes, self._label_field, where)

    @property
    def has_numbers(self) -> bool:
        """Whether the class is a number in a .cls, as its first sample shows."""
        stored = next(iter(self._shards.values()))
        row: Any = rows_of(self.source, stored)[0]
        members = bytes(self.source.read(stored.shard, int(row["offset"]), int(row["length"])))
        return has_number(Row(*row.item()), members, f"{self.source.location}: {stored.shard.name}")

    def _read(self, record: Record) -> tuple[Row, bytes]:
        stored = self._shards[record.name.partition("/")[0]]
        rows = rows_of(self.source, stored)
        row: Any = rows[rows["offset"].searchsorted(record.offset)]
        members = bytes(self.source.read(stored.shard, record.offset, record.length))
        sample_of(self.source, stored.shard, row, members)
        return Row(*row.item()), members
