"""From a listing of images to a folder of shards: plan, write in parallel, index, manifest last.

    listing -> plan -> workers, each: record -> bytes -> checked -> resized -> appended to its tar
                    -> finish: indexes, report, manifest

A data set's file in convert/ yields the listing; all that follows is the same for every data set.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rackrun.commandline.program import Stopped
from rackrun.convert.images.info import LEFT_OUT, findings_of
from rackrun.convert.options import Packing
from rackrun.convert.packing.finalize import close_folder, print_use
from rackrun.convert.packing.output_folder import ShardResult, Target
from rackrun.convert.packing.plan import PlannedShard, ShardPlan, make_plan
from rackrun.convert.packing.workers import in_parallel, working_on
from rackrun.convert.progress import metered
from rackrun.convert.readers.directories import Folder
from rackrun.convert.readers.records import (
    TEST,
    TRAIN,
    VAL,
    Container,
    Defect,
    ImageDefect,
    RecordListing,
    as_text,
)
from rackrun.errors import DataError, UsageError
from rackrun.shards.index import INDEX_FIELDS, Row
from rackrun.shards.writer import write_shard
from rackrun.terminal import clean, say
from rackrun.units import first_few, plural


def pack(listing: RecordListing, packing: Packing, out: Path) -> None:
    """Convert a data set into the folder `out`, or an array task's part of it.

    The tasks of an array job fill the folder together: each writes other shards of one plan, and
    the last to end completes it.
    """
    refuse_inside(out, listing.containers)
    for option, percent in (("val", packing.val_percent), ("test", packing.test_percent)):
        if 0 < percent < 1:
            meant = f"for a fraction of {percent:g}, type --{option}-percent {100 * percent:g}"
            say(f"--{option}-percent {percent:g}: less than one percent; {meant}")
    target = Target(out)
    is_share = packing.task_index is not None
    with target.locked(shared=is_share):
        say(f"{out}: listing the images of {listing.dataset}")
        plan = make_plan(replace(listing, records=metered(listing.records, "listed")), packing)
        if not packing.force and target.holds(plan):
            target.clear_work()
            say(f"{out}: already has this data set")
            print_use(out, listing.dataset)
            return
        say(clean(_contents(plan)))
        target.begin(plan, packing.force)
        write_shards(target, plan, packing)
        if not is_share:
            close_folder(target, plan, packing)
    if is_share:
        _close_after_all(target, plan, packing)


def _contents(plan: ShardPlan) -> str:
    """Return what a user may find to be other than what was meant: the classes and the splits."""
    classes, images = plan.listing.classes, Counter[str]()
    for shard in plan.shards:
        images[shard.split] += shard.images
    splits = ", ".join(
        f"{split} {images[split]:,}" for split in (TRAIN, VAL, TEST) if images[split]
    )
    names = first_few(classes, 5)
    return f"{plural(len(classes), 'class', 'classes')}: {names}; images: {splits}"


def _close_after_all(target: Target, plan: ShardPlan, packing: Packing) -> None:
    """Complete the folder if no other task has shards to write."""
    if missing := sum(not target.result(shard) for shard in plan.shards):
        of = f"{missing} of {len(plan.shards)} shards are missing"
        say(f"{target.folder}: {of}; the last task that ends completes the folder")
        return
    # Each task comes here after its last shard, so one that still holds the lock will, too.
    with target.lock() as holder:
        if not holder and not target.holds(plan):
            close_folder(target, plan, packing)


def refuse_inside(out: Path, containers: Sequence[Container]) -> None:
    """Refuse an output folder inside the source: its shards would be listed the next time."""
    for container in containers:
        if isinstance(container, Folder) and out.resolve().is_relative_to(container.root.resolve()):
            raise UsageError(f"{out}: lies inside {container.root}; choose a folder outside it")


def write_shards(target: Target, plan: ShardPlan, packing: Packing) -> None:
    """Write those of this task's shards that are not there yet."""
    # Every n-th shard: each task of an array job gets a part of every split.
    mine = plan.shards[packing.task_index or 0 :: packing.task_count]
    jobs = [shard for shard in mine if not target.result(shard)]
    if len(jobs) < len(mine):
        say(f"{target.folder}: {len(mine) - len(jobs)} of {len(mine)} shards are already there")

    def work(shard: PlannedShard) -> None:
        _write(target, plan, shard)

    try:
        in_parallel(jobs, work, packing.processes, "converted", sum(job.images for job in jobs))
    except Stopped:
        raise  # SIGTERM has an exit code of its own
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{target.folder}: finished shards are kept; type the same command to continue"
        ) from None
    finally:
        target.clear_partials({shard.name for shard in jobs})


def _write(target: Target, plan: ShardPlan, shard: PlannedShard) -> None:
    """Write one tar, and its result beside the plan."""
    rows, findings = list[Row](), list[ImageDefect]()
    working_on(shard.name, images=0)
    with write_shard(target.tar(shard.name)) as writer:
        for record in plan.records(shard):
            name = as_text(record.name)
            working_on(f"{shard.name}: {name}")
            try:
                container = plan.listing.containers[record.container]
                image = plan.treatment.stored(record, container)
            except Defect as defect:
                findings.append(ImageDefect(name, defect.kind, defect.detail))
                continue
            findings += findings_of(name, image.info, plan.listing.usual)
            position = writer.add(record.key, record.label, image.data)
            size = image.info.width, image.info.height
            facts = len(image.data), record.label, *size, image.crc, image.info.extension.encode()
            rows.append((shard.number, *position, *facts))
        working_on(shard.name, images=0)
        if not rows:
            first = findings[0]
            detail = f" ({first.detail})" if first.detail else ""
            raise DataError(
                f"{shard.name}: no image in it is whole; the first, {first.name}, is "
                f"{LEFT_OUT[first.kind]}{detail}; if the source has failed, type the same command "
                "when it is back; otherwise type a smaller --shards"
            )
        written = writer.close()
    # The tar is whole before its result is there: a result is what says that a shard is done.
    result = ShardResult(written, tuple(findings))
    target.save_result(result, np.array(rows, INDEX_FIELDS))
