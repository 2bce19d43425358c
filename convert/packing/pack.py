"""From a listing of images to a folder of shards: plan, write in parallel, index, manifest last.

    listing -> plan -> workers, each: record -> bytes -> checked -> resized -> appended to its tar
                    -> finish: indexes, report, manifest

A data set's file in convert/ yields the listing; all that follows is the same for every data set.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from rackrun.commandline.options import Examples, Positional
from rackrun.commandline.program import Stopped
from rackrun.commands import called
from rackrun.convert.images.info import LEFT_OUT, findings
from rackrun.convert.options import Packing
from rackrun.convert.packing.finalize import close_folder, objection, print_use
from rackrun.convert.packing.output_folder import ShardResult, Target
from rackrun.convert.packing.plan import PlannedShard, ShardPlan, make_plan
from rackrun.convert.packing.record_table import RecordTable
from rackrun.convert.packing.workers import in_parallel, working_on
from rackrun.convert.progress import metered
from rackrun.convert.readers.directories import Folder
from rackrun.convert.readers.records import Container, Defect, ImageDefect, RecordListing
from rackrun.errors import DataError, UsageError
from rackrun.shards.index import INDEX_FIELDS, Row
from rackrun.shards.writer import write_shard
from rackrun.terminal import say
from rackrun.units import first_few

NAMED = 5  # missing shards that a message names


def pack(listing: RecordListing, packing: Packing, out: Path) -> None:
    """Convert a data set into the folder `out`, or an array task's part of it."""
    refuse_inside(out, listing.containers)
    target = Target(out)
    is_share = packing.task_index is not None
    # The tasks of an array job fill the folder together: each writes other shards of one plan.
    with target.locked(shared=is_share):
        say(f"{out}: listing the images of {listing.dataset}")
        counted = replace(listing, records=metered(listing.records, "listed"))
        plan, table = make_plan(counted, packing)
        if not target.begin(plan, packing.force):
            say(f"{out}: already has this data set")
            print_use(out, plan.dataset)
            return
        write_shards(target, plan, table, listing.containers, packing)
        if not is_share:
            close_folder(target, plan, packing.allow_left_out, packing.allow)
    if is_share:
        close = f"{called('convert')} finish {shlex.quote(str(out))}"
        say(f"{out}: when all {packing.task_count} tasks have ended, type: {close}")


@dataclass(frozen=True)
class Finish:
    """Complete the shard folder that the tasks of an array job have written."""

    examples: ClassVar[Examples] = (("{prog} data/shards", "after all tasks of an array job"),)

    out: Positional[Path]
    """Folder with the shards."""
    allow_left_out: int | None = None
    """Number of damaged images that may be left out; default: 1 %, of a small set 10 %."""
    allow: tuple[Literal["leaks"], ...] = ()
    """leaks: copies of an image in several splits."""

    def run(self) -> None:
        """Write indexes, report and manifest; refuse while a shard is missing."""
        if (self.allow_left_out or 0) < 0:
            raise UsageError("--allow-left-out cannot be negative")
        out, target = self.out, Target(self.out)
        if not out.is_dir():
            raise UsageError(f"{out}: there is no such folder")
        with target.locked():
            if target.manifest.exists():
                say(f"{out}: already finished")
                print_use(out, target.read().dataset)
                return
            if not target.plan.exists():
                raise UsageError(f"{out}: no conversion was started here")
            plan = ShardPlan.load(target.plan)
            missing = [shard.name for shard in plan.shards if not target.result(plan, shard)]
            if missing:
                raise DataError(
                    f"{out}: {len(missing)} of {len(plan.shards)} shards are missing: "
                    f"{first_few(missing, NAMED)}; run the tasks that failed again"
                )
            close_folder(target, plan, self.allow_left_out, self.allow)


def refuse_inside(out: Path, containers: Sequence[Container]) -> None:
    """Refuse an output folder inside the source: its shards would be listed the next time."""
    for container in containers:
        if isinstance(container, Folder) and out.resolve().is_relative_to(container.root.resolve()):
            raise UsageError(f"{out}: lies inside {container.root}; choose a folder outside it")


def write_shards(
    target: Target,
    plan: ShardPlan,
    table: RecordTable,
    containers: Sequence[Container],
    packing: Packing,
) -> None:
    """Write those of this task's shards that are not there yet."""
    # Every n-th shard: each task of an array job gets a part of every split.
    mine = plan.shards[packing.task_index or 0 :: packing.task_count]
    jobs = _unfinished(target, plan, mine, packing.allow_left_out)
    if len(jobs) < len(mine):
        say(f"{target.folder}: {len(mine) - len(jobs)} of {len(mine)} shards are already there")

    def work(shard: PlannedShard) -> None:
        _write(target, plan, shard, table, containers)

    try:
        in_parallel(jobs, work, packing.processes, "converted", sum(job.images for job in jobs))
    except Stopped:
        raise  # SIGTERM has an exit code of its own
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{target.folder}: finished shards are kept; type the same command to continue"
        ) from None
    finally:
        target.clear_partials(jobs)


def _unfinished(
    target: Target, plan: ShardPlan, mine: Sequence[PlannedShard], allowed: int | None
) -> list[PlannedShard]:
    results = {shard.name: target.result(plan, shard) for shard in plan.shards}
    existing = [result for result in results.values() if result]
    if len(existing) < len(plan.shards) or not objection(plan, existing, allowed):
        return [shard for shard in mine if not results[shard.name]]
    # Too many images are missing: a source that had failed may be complete by now, so the shards
    # that lack some are made again.
    short = {result.shard.name for result in existing if result.is_short}
    for shard in mine:
        if shard.name in short:
            # Without its result the shard counts as missing, and is written again.
            target.done(shard.name).unlink(missing_ok=True)
    return [shard for shard in mine if shard.name in short]


def _write(
    target: Target,
    plan: ShardPlan,
    shard: PlannedShard,
    table: RecordTable,
    containers: Sequence[Container],
) -> None:
    """Write one tar, and its result beside the plan."""
    rows, found, names = list[Row](), list[ImageDefect](), dict[str, str]()
    working_on(shard.name, images=0)
    with write_shard(target.tar(shard.name)) as writer:
        for number in range(shard.start, shard.start + shard.images):
            record = table[number]
            working_on(f"{shard.name}: {record.name}")
            try:
                image = plan.treatment.stored(record, containers[record.container])
            except Defect as defect:
                found.append(ImageDefect(record.name, defect.kind, defect.detail))
                continue
            found += findings(record.name, image.info, plan.usual)
            position = writer.add(record.key, record.label, image.data)
            names[record.key] = record.name
            rows.append(
                Row(
                    shard=shard.number,
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
            )
        working_on(shard.name, images=0)
        if not rows:
            first = found[0]
            raise DataError(
                f"{shard.name}: no image in it is whole; the first, {first.name}, is "
                f"{LEFT_OUT[first.kind]}; if the source has failed, type the same command when it"
                " is back; otherwise type a smaller --shards"
            )
        written = writer.close()
    # The tar is whole before its result is there: a result is what says that a shard is done.
    target.save_result(plan, ShardResult(written, np.array(rows, INDEX_FIELDS), found), names)
