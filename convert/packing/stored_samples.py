"""The samples of a shard folder as a source of records, to be copied as they are stored.

A sample is one range of bytes of its tar, whatever members it has. Only its class may be written
anew: that in its .cls, which every sample of a conversion has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from convert.packing.copies import image_marks
from convert.packing.workers import in_parallel, working_on
from convert.progress import Progress, meter
from convert.readers.records import Record, as_text
from convert.readers.tars import Tar
from rackrun.errors import DataError
from rackrun.terminal import clean
from shards.index import Manifest, Origin, Row, Shard
from shards.source import Source
from shards.verify import key_in, sample_of
from shards.writer import BLOCK, END, resized_header

if TYPE_CHECKING:
    import numpy as np

LABEL_SUFFIX = ".cls"
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


def marks_of(rows: np.ndarray) -> list[int]:
    """Return CRC-32 and length of each image as one number, by which equal ones are found."""
    marks: list[int] = image_marks(rows).tolist()
    return marks


def keys_of(
    shards: Sequence[tuple[Source, StoredShard]], workers: int
) -> dict[str, tuple[StoredShard, list[str]]]:
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
    keys: dict[str, tuple[StoredShard, list[str]]] = {}
    total = sum(stored.shard.samples for _, stored in shards)
    steps = in_parallel(range(len(shards)), read, workers)
    with closing(steps), meter("read the names of", total, "samples") as shown:
        for result in steps:
            keys[result.stored.shard.name] = result.stored, result.keys
            shown.advance(Progress(len(result.keys), 0))
    return keys


def _long_key(source: Source, shard: Shard, row: Any) -> str:
    """Return the key of a sample whose image has a longer name than its header has room for."""
    start = int(row["offset"])
    descriptor = os.memfd_create("sample")
    with os.fdopen(descriptor, "wb") as file:
        file.write(source.read(shard, start, int(row["length"])))
        file.write(END)
        file.flush()
        tar = Tar(Path(f"{source.location}: {shard.name}"), descriptor)
        image = int(row["image_offset"]) - start
        name = next((each.name for each in tar.members() if each.offset == image), "")
    folder, slash, member = as_text(name).rpartition("/")
    return folder + slash + member.partition(".")[0]


class StoredSamples:
    """A version of a shard folder as a container; a record's name is SHARD/KEY."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._shards = {stored.shard.name: stored for stored in shards_of(source.manifest)}

    def origin(self) -> Origin:
        """Return the version as an entry of a manifest."""
        size = sum(stored.shard.bytes for stored in self._shards.values())
        return Origin(self.source.manifest.dataset, size, self.source.manifest.digest)

    def records(
        self, keys: Mapping[str, tuple[StoredShard, list[str]]], labels: Mapping[str, int | None]
    ) -> Iterator[Record]:
        """Yield a record per sample; `labels` has new ones by key, None for what is left out."""
        for name, (stored, shard_keys) in keys.items():
            rows = rows_of(self.source, stored)
            for key, row in zip(shard_keys, rows, strict=True):
                label = labels.get(key, int(row["label"]))
                if label is None:
                    continue
                offset, length = int(row["offset"]), int(row["length"])
                name_of = f"{name}/{key}"
                yield Record(key, label, stored.split, name_of, 0, offset, length, length)

    def read(self, record: Record) -> bytes:
        """Return the members of a sample, verified, as its tar has them."""
        return self._read(record)[1]

    def labelled(self, record: Record) -> tuple[Row, bytes]:
        """Return a sample's row and members with the label of its record; DataError if damaged."""
        row, members = self._read(record)
        if row.label == record.label:
            return row, members
        manifest = self.source.manifest
        name = manifest.classes[record.label] if manifest.adopted else ""
        where = f"{self.source.location}: {record.name}"
        members = _with_label(members, record.label, name, where)
        return row._replace(label=record.label), members

    def _read(self, record: Record) -> tuple[Row, bytes]:
        stored = self._shards[record.name.partition("/")[0]]
        rows = rows_of(self.source, stored)
        row: Any = rows[rows["offset"].searchsorted(record.offset)]
        members = bytes(self.source.read(stored.shard, record.offset, record.length))
        sample_of(self.source, stored.shard, row, members)
        return Row(*row.item()), members


def _with_label(members: bytes, label: int, name: str, where: str) -> bytes:
    """Return the members of a sample with another class in its .cls: the number, or the name.

    It is the name, which only samples of other programs have, where it was one before.
    """
    at = 0
    while at + BLOCK <= len(members):
        header = members[at : at + BLOCK]
        size = int(header[124:136].rstrip(b" \0") or b"0", 8)
        end = at + BLOCK + -(-size // BLOCK) * BLOCK
        if header[:100].rstrip(b"\0").lower().endswith(LABEL_SUFFIX.encode()):
            old = members[at + BLOCK : at + BLOCK + size]
            text = name.encode() if name and not old.strip().isdigit() else b"%d" % label
            room = end - at - BLOCK
            if len(text) <= room:
                new = resized_header(header, len(text)) + text.ljust(room, b"\0")
                return members[:at] + new + members[end:]
        at = end
    raise DataError(
        clean(where)
        + f": its class is in no {LABEL_SUFFIX}, so it cannot be changed in the tar; drop it, and"
        " append the image to its class"
    )
