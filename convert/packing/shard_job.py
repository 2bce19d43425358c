"""The work of one process: a shard's records in, its tar and its result out."""

from dataclasses import dataclass, field, replace

from rackrun.convert.images.info import LEFT_OUT, findings
from rackrun.convert.packing.output_folder import ShardResult, Target
from rackrun.convert.packing.plan import PlannedShard, ShardPlan, records_of
from rackrun.convert.packing.workers import ReportProgress, working_on
from rackrun.convert.progress import Progress
from rackrun.convert.readers.records import Container, Defect, ImageDefect, Record
from rackrun.errors import DataError
from rackrun.shards.index import PACKED_ROW, Row
from rackrun.shards.writer import ShardWriter, write_shard


def write_one(
    target: Target,
    plan: ShardPlan,
    shard: PlannedShard,
    containers: tuple[Container, ...],
    report: ReportProgress,
) -> None:
    """Write one tar, and its result beside the plan."""
    working_on(shard.name)
    with write_shard(target.tar(shard.name)) as writer:
        filler = _ShardFiller(plan, shard, writer)
        for record in records_of(target.plan, shard):
            working_on(f"{shard.name}: {record.name}")
            container = containers[record.container]
            filler.add(record, container)
            report(Progress(1, record.size))
        working_on(shard.name)
        if not writer.samples:
            first = filler.findings[0]
            raise DataError(
                f"{shard.name}: no image in it is whole; the first, {first.name}, is "
                f"{LEFT_OUT[first.kind]}; if the source has failed, run the same command when it is"
                " back; else ask for fewer --shards"
            )
        written = writer.close()
    # The tar is whole before its result is there: a result is what says that a shard is done.
    target.save_result(plan, ShardResult(written, bytes(filler.rows), filler.findings))


@dataclass
class _ShardFiller:
    """A tar that is being filled, with its rows and findings."""

    plan: ShardPlan
    shard: PlannedShard
    writer: ShardWriter
    rows: bytearray = field(default_factory=bytearray)  # packed, as the index has them
    findings: list[ImageDefect] = field(default_factory=list)

    def add(self, record: Record, container: Container) -> None:
        """Append an image, or note why it is left out."""
        try:
            image = self.plan.treatment.stored(record, container)
        except Defect as defect:
            self.findings.append(ImageDefect(record.name, defect.kind, defect.detail))
            return
        unusual = (kind for kind in image.info.oddities if kind not in self.plan.usual)
        self.findings += findings(record.name, replace(image.info, oddities=tuple(unusual)))
        position = self.writer.add(record.key, record.label, image.data)
        row = Row(
            shard=self.shard.number,
            offset=position.offset,
            length=position.length,
            image_offset=position.image_offset,
            image_length=len(image.data),
            label=record.label,
            width=image.info.width,
            height=image.info.height,
            crc=image.crc,
            format=image.info.extension.encode(),
        )
        self.rows += PACKED_ROW.pack(*row)
