"""More images for a finished shard folder: a conversion whose plan begins where the last one ended.

    listing -> what no version has yet -> plan -> shards -> copies, leaks -> next version

No file that a version has is written again.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import NamedTuple

from convert.images.transcoder import library
from convert.images.treatment import Treatment
from convert.options import Packing
from convert.packing.copies import image_marks
from convert.packing.pack import refuse_inside, write_shards, write_version
from convert.packing.plan import make_plan
from convert.packing.sidecars import write_sidecars
from convert.packing.stored_samples import keys_of, rows_of
from convert.packing.workers import in_parallel, working_on
from convert.progress import Progress, meter, metered
from convert.readers.names import free_key
from convert.readers.records import Container, Defect, Record, RecordListing
from convert.versions.parent import Parent
from rackrun.terminal import say
from rackrun.units import plural

COMPARED_AT_ONCE = 64  # images


def append_images(
    parent: Parent, listing: RecordListing, packing: Packing, takes_dropped: bool
) -> None:
    """Make the next version; what is interrupted goes on with the same arguments.

    `takes_dropped`: also images that an earlier version has dropped.
    """
    folder, manifest = parent.target.folder, parent.manifest
    refuse_inside(folder, listing.containers)
    if packing.tiles and not packing.preset.encodes_all:
        library()  # or an error, before anything is read
    (container,) = listing.containers
    say(f"{folder}: listing the images of {listing.dataset}")
    records = list(metered(listing.records, "listed"))
    kept, counts = _new_records(parent, records, container, packing, takes_dropped)
    for line in _remarks(counts):
        say(f"{folder}: {line}")
    if not kept:
        say(f"{folder}: nothing to add; the newest version is {manifest.number}")
        if manifest.sidecars:  # which an append that was killed may have left out
            write_sidecars(folder, packing.processes, only_missing=True)
        return
    merged = _with_classes_of(manifest.classes, listing, kept)
    plan, lines = make_plan(replace(merged, dataset=manifest.dataset), packing, parent.starts())
    plan = parent.planned(plan)
    write = partial(write_shards, parent.target, plan, (container,), packing)
    write_version(parent.target, plan, lines, packing, parent.source, write)
    parent.say_added(plan)


class ImageStatus(Enum):
    """What becomes of an image that is to be appended."""

    NEW = "new"
    OTHER = "other images of names that are taken; their keys end with their CRC-32"
    PRESENT = "are in it already"
    DROPPED = "were dropped by an earlier version; to take them again, add --allow dropped"


class _Compared(NamedTuple):
    """What a worker reports: for each record of a job, the mark of what would be stored."""

    job: int
    marks: list[int]


def _new_records(
    parent: Parent,
    records: Sequence[Record],
    container: Container,
    packing: Packing,
    takes_dropped: bool,
) -> tuple[list[Record], Counter[ImageStatus]]:
    """Return the records that no version has yet, with keys that no version has.

    A name alone proves nothing: what would be stored of an image is compared with what is stored.
    """
    marks, current = _marks(parent, packing.processes)
    doubtful = [record for record in records if record.key.lower() in marks]
    stored = dict[Record, int]()
    if doubtful:
        compared = _marks_of(doubtful, container, packing)
        stored = dict(zip(doubtful, compared, strict=True))
    taken = set(marks)
    kept, counts = list[Record](), Counter[ImageStatus]()
    for record in records:
        status, key = _status(record, stored.get(record), marks, current)
        counts[status] += 1
        if status is ImageStatus.PRESENT or (status is ImageStatus.DROPPED and not takes_dropped):
            continue
        if status is ImageStatus.OTHER:
            key = free_key((key,), record.name, taken)
        taken.add(key.lower())
        kept.append(record._replace(key=key))
    return kept, counts


def _status(
    record: Record, mark: int | None, marks: Mapping[str, int], current: set[str]
) -> tuple[ImageStatus, str]:
    """Return the status of an image, and the key for it: with its CRC-32 if that is taken."""
    if mark is None:
        return ImageStatus.NEW, record.key
    marked = f"{record.key[:81]}-{mark >> 32:08x}"
    for key in (record.key, marked):
        if marks.get(key.lower()) == mark:
            return (ImageStatus.PRESENT if key.lower() in current else ImageStatus.DROPPED), key
    return ImageStatus.OTHER, marked


def _marks(parent: Parent, workers: int) -> tuple[dict[str, int], set[str]]:
    """Return the mark of each sample of all versions by its key, and the keys of the newest."""
    stored = list(parent.stored())
    keys = keys_of([(source, each) for source, each, _ in stored], workers)
    marks, current = dict[str, int](), set[str]()
    for source, each, is_newest in stored:
        shard_marks = image_marks(rows_of(source, each)).tolist()
        shard_keys = [key.lower() for key in keys[each.shard.name].keys]
        marks.update(zip(shard_keys, shard_marks, strict=True))
        if is_newest:
            current.update(shard_keys)
    return marks, current


def _marks_of(records: Sequence[Record], container: Container, packing: Packing) -> list[int]:
    """Return checksum and length of what would be stored of each record, made side by side.

    It is 0 for an image that cannot be used, which the conversion will name.
    """
    upright = packing.exif == "apply"
    treatment = Treatment(packing.preset, bool(packing.tiles), packing.check, upright)
    jobs = range(0, len(records), COMPARED_AT_ONCE)

    def compare(job: int, report: Callable[[_Compared], None]) -> None:
        marks = []
        for record in records[job : job + COMPARED_AT_ONCE]:
            working_on(record.name)
            try:
                image = treatment.stored(record, container)
                marks.append(image.crc << 32 | len(image.data))
            except Defect:
                marks.append(0)
        report(_Compared(job, marks))

    marks = [0] * len(records)
    steps = in_parallel(jobs, compare, packing.processes)
    with closing(steps), meter("compared", len(records)) as shown:
        for result in steps:
            marks[result.job : result.job + len(result.marks)] = result.marks
            shown.advance(Progress(len(result.marks), 0))
    return marks


def _with_classes_of(
    classes: tuple[str, ...], listing: RecordListing, records: Sequence[Record]
) -> RecordListing:
    """Return the listing with the numbers of these classes; new ones get numbers after them."""
    used = {record.label for record in records}
    new = [name for label, name in enumerate(listing.classes) if label in used]
    merged = tuple(dict.fromkeys((*classes, *new)))
    numbers = {name: number for number, name in enumerate(merged)}
    labelled = (record._replace(label=numbers[listing.classes[record.label]]) for record in records)
    return replace(listing, classes=merged, records=labelled)


def _remarks(counts: Counter[ImageStatus]) -> Iterator[str]:
    """Yield what became of images that are not simply new."""
    for kind, count in counts.items():
        if kind is not ImageStatus.NEW:
            yield f"{plural(count, 'image')}: {kind.value}"
