"""The samples of a shard folder as a source of records, to be copied as they are stored.

A sample is one range of bytes of its tar, whatever members it has. Only its class may be written
anew, where it stands: in its .cls, .json or .txt. A number stays a number, a name a name, and all
other bytes of the sample stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rackrun.convert.packing.workers import ReportProgress, in_parallel, working_on
from rackrun.convert.progress import Progress
from rackrun.convert.readers.records import Record
from rackrun.convert.readers.tars import Tar
from rackrun.convert.readers.webdataset_tars import (
    LABEL_FIELD,
    TarSample,
    label_member,
    label_of,
    samples_in,
)
from rackrun.errors import DataError
from rackrun.shards.index import Origin, Row, Shard
from rackrun.shards.samples import NAME_BYTES, key_in, sample_of
from rackrun.shards.source import Source
from rackrun.shards.writer import BLOCK, END, resized_header
from rackrun.terminal import clean

if TYPE_CHECKING:
    import numpy as np

BLANKS = re.compile(r"[ \t\n\r]*")


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
        # Not by searchsorted, which copies the column first: 2 ms in an index of 1.28 million rows,
        # and a squash comes here for every sample.
        low, high = (find(rows["shard"], self.number) for find in (bisect_left, bisect_right))
        return rows[low:high]


ShardKeys = Mapping[StoredShard, Sequence[str]]
"""The keys of the samples of shards, in the order of their rows."""


def shards_of(source: Source) -> list[StoredShard]:
    """Return the shards of all splits of a version."""
    return [
        StoredShard(source, split.name, number, shard)
        for split in source.manifest.splits
        for number, shard in enumerate(split.shards)
    ]


def keys_of(shards: Sequence[StoredShard], workers: int) -> ShardKeys:
    """Return the keys of the samples of these shards, read side by side."""

    def read(stored: StoredShard, report: ReportProgress) -> list[str]:
        working_on(stored.where)
        rows = stored.rows
        starts = [int(start) - BLOCK for start in rows["image_offset"]]
        headers = stored.source.reads([(stored.shard, start, BLOCK) for start in starts])
        keys = []
        for header, start, row in zip(headers, starts, rows, strict=True):
            if b"\0" in bytes(header[:NAME_BYTES]):
                keys.append(key_in(bytes(header), stored.where, start))
                continue
            # The name of the image fills its header: only the extended header before has all of it.
            first = int(row["offset"])
            members = bytes(stored.source.read(stored.shard, first, int(row["length"])))
            with _opened(Row(*row.item()), members, stored.where) as (_, sample):
                keys.append(sample.key if sample else "")
        report(Progress(len(keys)))
        return keys

    for stored in shards:
        stored.source.index(stored.split)  # read before the fork, so that all workers have it
    total = sum(stored.shard.samples for stored in shards)
    keys = in_parallel(shards, read, workers, "read the names of", total, "samples")
    return dict(zip(shards, keys, strict=True))


class StoredSamples:
    """A version of a shard folder as a container; a record's name is SHARD/KEY.

    `label_field` is that of .json members with the class, in tars of other programs.
    """

    def __init__(self, source: Source, label_field: str = LABEL_FIELD) -> None:
        self.source, self._label_field = source, label_field
        self._shards = {stored.shard.name: stored for stored in shards_of(source)}

    def origin(self) -> Origin:
        """Return the version as an entry of a manifest."""
        size = sum(stored.shard.bytes for stored in self._shards.values())
        return Origin(self.source.manifest.dataset, size, self.source.manifest.digest)

    def records(self, keys: ShardKeys, labels: Mapping[str, int | None]) -> Iterator[Record]:
        """Yield a record per sample; `labels` has new ones by name, None for what is left out."""
        for stored, shard_keys in keys.items():
            for key, row in zip(shard_keys, stored.rows, strict=True):
                name = f"{stored.shard.name}/{key}"
                label = labels.get(name, int(row["label"]))
                if label is not None:
                    offset, length = int(row["offset"]), int(row["length"])
                    yield Record(key, label, stored.split, name, 0, offset, length, length)

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
        row: Any = stored.rows[0]
        members = bytes(self.source.read(stored.shard, int(row["offset"]), int(row["length"])))
        with _opened(Row(*row.item()), members, stored.where) as (tar, sample):
            suffix, member = (sample and label_member(sample)) or ("", None)
            return bool(suffix == ".cls" and member and tar.content(member).strip().isdigit())

    def _read(self, record: Record) -> tuple[Row, bytes]:
        stored = self._shards[record.name.partition("/")[0]]
        rows = stored.rows
        row: Any = rows[rows["offset"].searchsorted(record.offset)]
        members = bytes(self.source.read(stored.shard, record.offset, record.length))
        sample_of(self.source, stored.shard, row, members)
        return Row(*row.item()), members


def relabelled(
    row: Row, members: bytes, label: int, classes: Sequence[str], field: str, where: str
) -> tuple[Row, bytes]:
    """Return a sample's row and members with another class.

    `field` is that of a .json with the class. DataError if the class there is not that of the row.
    """
    with _opened(row, members, where) as (tar, sample):
        labelled = label_member(sample) if sample else None
        old = label_of(tar, sample, field) if sample else None
        if not labelled or old not in (row.label, classes[row.label]):
            raise DataError(
                clean(f"{where}: its class is {classes[row.label]}, and the tar has {old}")
                + "; if a .json has the class in another field, add --label-field NAME"
            )
        suffix, member = labelled
        content = tar.content(member)
    try:
        text = content.decode()
        # Only these letters change: blanks around a text stay, and so do the other fields of JSON.
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if suffix == ".json":
            start, end = _field_span(text, field)
    except (ValueError, IndexError):  # JSON may be UTF-16, or begin with a byte order mark
        raise DataError(clean(f"{where}: its {suffix} is no plain UTF-8; drop it")) from None
    new = str(label) if isinstance(old, int) else classes[label]
    if suffix == ".json" and text[start] == '"':
        new = json.dumps(new, ensure_ascii=text.isascii())
    content = (text[:start] + new + text[end:]).encode()
    # Members are whole blocks: where the new class needs more or fewer, all behind it moves.
    at, after = member.offset, -(-(member.offset + member.size) // BLOCK) * BLOCK
    header = resized_header(members[at - BLOCK : at], len(content))
    content += bytes(-len(content) % BLOCK)
    moved = len(content) - (after - at)
    changed = row._replace(
        label=label,
        length=row.length + moved,
        image_offset=row.image_offset + (moved if row.image_offset - row.offset > at else 0),
    )
    return changed, members[: at - BLOCK] + header + content + members[after:]


@contextlib.contextmanager
def _opened(row: Row, members: bytes, where: str) -> Iterator[tuple[Tar, TarSample | None]]:
    """Yield the members of a sample as a tar, and the sample in it that has the row's image."""
    descriptor = os.memfd_create("sample")
    with os.fdopen(descriptor, "wb") as file:
        file.write(members + END)
        file.flush()
        tar, image_at = Tar(Path(where), descriptor), row.image_offset - row.offset
        # What lies between two samples belongs to the later one, so there may be others before it.
        samples = (each for each in samples_in(tar) if each.image and each.image.offset == image_at)
        yield tar, next(samples, None)


def _field_span(text: str, field: str) -> tuple[int, int]:
    """Return where the value of a field begins and ends in a JSON object that has it.

    A parser that keeps the places of values is not in the standard library; one that says where a
    value ends is.
    """
    decode, span = json.JSONDecoder().raw_decode, (0, 0)

    def skip(at: int) -> int:
        blanks = BLANKS.match(text, at)
        return blanks.end() if blanks else at

    at = skip(0)  # of the brace, then of the comma after each value
    while text[at] != "}" and text[skip(at + 1)] != "}":
        name, end = decode(text, skip(at + 1))
        start = skip(skip(end) + 1)
        _, end = decode(text, start)
        if name == field:  # the last one counts where there are two, as in json.loads
            span = start, end
        at = skip(end)
    return span
