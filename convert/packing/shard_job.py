"""The work of one process: a shard's records in, its tar and what has become of it out."""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from convert.image_info import LEFT_OUT, ImageInfo, findings, inspect
from convert.packing.output_folder import Target
from convert.packing.plan import PlannedShard, ShardPlan, records_of
from convert.packing.shard_result import ResultRows, ShardResult
from convert.progress import Progress
from convert.readers.records import Container, Defect, ImageDefect, Record
from rackrun.errors import DataError
from shards.index import Row
from shards.writer import Position, ShardWriter, write_shard

TELL_SECONDS = 0.2
EXTENSION = "jpg"  # of every picture: stock readers ask for one, and their decoders go by the bytes

Tell = Callable[[Progress], None]


def write_one(
    target: Target,
    plan: ShardPlan,
    shard: PlannedShard,
    containers: tuple[Container, ...],
    tell: Tell,
) -> None:
    """Write one tar, and beside the plan what has become of its pictures."""
    pace = _Pace(tell)
    with write_shard(target.tar(shard.name)) as writer:
        filling = _Filling(plan, shard, writer)
        for record in records_of(target.plan, shard):
            filling.add(record, containers[record.container])
            pace.advance(record.size)
        if not writer.samples:
            raise DataError(_nothing_left(shard, filling.findings))
        written = writer.close()
    ShardResult(written, filling.rows.packed(), filling.findings).save(
        target.done(shard.name), plan
    )
    pace.end()


def _nothing_left(shard: PlannedShard, found: list[ImageDefect]) -> str:
    first = found[0]
    return (
        f"{shard.name}: no picture in it is whole; the first, {first.name}, is "
        f"{LEFT_OUT[first.kind]}; if the source has failed, run the same command when it is back; "
        "else ask for fewer --shards"
    )


@dataclass
class _Filling:
    """A tar on its way, with its rows and findings."""

    plan: ShardPlan
    shard: PlannedShard
    writer: ShardWriter
    rows: ResultRows = field(default_factory=ResultRows)
    findings: list[ImageDefect] = field(default_factory=list)

    def add(self, record: Record, container: Container) -> None:
        """Append a picture, or note why it is left out."""
        try:
            data = container.read(record)
            crc = zlib.crc32(data)
            if record.crc not in (None, crc):
                raise Defect("checksum")
            look = inspect(data, PurePosixPath(record.name).suffix, self.plan.check == "decode")
            stored, stored_look = self.plan.preset.apply(data, look)
        except Defect as defect:
            self.findings.append(ImageDefect(record.name, defect.kind, defect.detail))
            return
        self.findings += findings(record.name, look)
        extension = stored_look.extension if self.plan.extension == "true" else EXTENSION
        place = self.writer.add(record.key, record.label, stored, extension)
        if stored is not data:
            crc = zlib.crc32(stored)
        self.rows.append(self._row(record.label, place, len(stored), stored_look, crc))

    def _row(self, label: int, place: Position, length: int, look: ImageInfo, crc: int) -> Row:
        return Row(
            shard=self.shard.number,
            offset=place.offset,
            length=place.length,
            image_offset=place.image_offset,
            image_length=length,
            label=label,
            width=look.width,
            height=look.height,
            crc=crc,
            format=look.extension.encode(),
        )


class _Pace:
    """Tells how far the work is, but only some times a second."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._pictures = self._bytes = 0
        self._told = time.monotonic()

    def advance(self, size: int) -> None:
        self._pictures += 1
        self._bytes += size
        if time.monotonic() - self._told > TELL_SECONDS:
            self.end()

    def end(self) -> None:
        self._tell(Progress(self._pictures, self._bytes))
        self._pictures = self._bytes = 0
        self._told = time.monotonic()
