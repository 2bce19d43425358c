"""More images for a finished shard folder.

    listing -> what no version has yet -> converted into DATA, under the next free numbers
            -> copies, leaks -> next version

No file that a version has is written again.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
from rackrun.convert.folder import listing as listing_of_folder
from rackrun.convert.images.treatment import Treatment
from rackrun.convert.options import Packing
from rackrun.convert.packing.copies import image_marks
from rackrun.convert.packing.finalize import checked_parts
from rackrun.convert.packing.pack import refuse_inside, write_shards
from rackrun.convert.packing.plan import make_plan
from rackrun.convert.packing.stored_samples import StoredShard, shards_of
from rackrun.convert.packing.workers import in_parallel, working_on
from rackrun.convert.progress import metered
from rackrun.convert.readers.names import free_key
from rackrun.convert.readers.records import (
    VAL,
    Container,
    Defect,
    ImageDefect,
    Listed,
    Record,
    RecordListing,
)
from rackrun.convert.table import Columns, ImageTable
from rackrun.convert.versions.version import NewestVersion
from rackrun.errors import UsageError
from rackrun.shards.index import Manifest
from rackrun.shards.resize import Resize
from rackrun.shards.writer import MAX_KEY_BYTES
from rackrun.terminal import say
from rackrun.units import plural

TABLES = (".csv", ".parquet", ".pq")
DEFAULT_VAL_PERCENT = 10.0
COMPARED_AT_ONCE = 64  # images


@dataclass(frozen=True)
class Append:
    """Add images to a finished shard folder, as a new version; its tars stay unchanged."""

    examples: ClassVar[Examples] = (
        ("{prog} photos data/shards", "all images of photos/ that are not in it yet"),
        ("{prog} new.csv data/shards --root photos", "the images that a table lists"),
        ("{prog} new.zip data/shards --val-percent 0", "a zip of class folders; all for training"),
    )

    source: Positional[Path]
    """Folder, zip or tar of class folders; CSV or Parquet file of paths and labels."""
    data: Positional[str]
    """Finished shard folder."""
    columns: Columns = field(default_factory=Columns)
    val_percent: float | None = None
    """Percent of each class of the new images to hold out, unless SOURCE has a validation split;
    default: 10 if DATA has one, else 0."""
    test_percent: float = 0.0
    """Percent of each class of the new images to set aside as the split test."""
    exif: Literal["apply", "ignore"] = "apply"
    """apply: turn images upright by their EXIF or XMP."""
    allow_left_out: int | None = None
    """Number of damaged images that may be left out; default: 1 %, of a small set 10 %."""
    allow: tuple[Literal["leaks", "similar-classes", "split-names", "dropped"], ...] = ()
    """leaks: copies of an image in several splits. similar-classes: class names that differ only by
    case, blanks, Unicode form or leading zeros. split-names: classes called train, val, test or
    the like. dropped: images that were dropped before. Repeatable."""
    exclude: tuple[str, ...] = ()
    """Files and folders to leave out, by name or path in SOURCE, with * and ?. Repeatable."""
    workers: int = 0
    """Number of processes; 0: one per core."""
    force: bool = False
    """Abandon another append to DATA that was interrupted."""

    def run(self) -> None:
        """Append; an interrupted append continues with the same command."""
        with NewestVersion.locked(self.data) as newest:
            _refuse_tars(self.source)
            packing = self._packing(newest.manifest)
            command = ("append", str(self.source), self.data)
            takes_dropped = "dropped" in self.allow
            append_images(newest, self._listing(), packing, takes_dropped, command)

    def _packing(self, manifest: Manifest) -> Packing:
        """Return the options of the conversion that made the folder, with those of this one."""
        holds_out = any(split.name == VAL for split in manifest.splits)
        default = min(DEFAULT_VAL_PERCENT, 90 - self.test_percent) if holds_out else 0.0
        return Packing(
            preset=Resize.of(manifest),
            val_percent=default if self.val_percent is None else self.val_percent,
            test_percent=self.test_percent,
            exif=self.exif,
            allow_left_out=self.allow_left_out,
            allow=tuple(each for each in self.allow if each != "dropped"),
            workers=self.workers,
            force=self.force,
        )

    def _listing(self) -> RecordListing:
        if self.source.suffix.lower() not in TABLES or self.source.is_dir():
            return listing_of_folder(
                self.source,
                Path(self.data),
                fewest=1,
                may_be_splits="split-names" in self.allow,
                exclude=self.exclude,
            )
        packing = Packing(allow_left_out=self.allow_left_out)
        return ImageTable(self.source, Path(self.data), self.columns, packing=packing).listing()


def _refuse_tars(source: Path) -> None:
    """Raise UsageError for a folder of tars of samples."""
    if any(next(source.glob(pattern), None) for pattern in ("*.tar", "*/*.tar")):
        raise UsageError(
            f"{source}: tars of samples: to train on them, too, type --data twice, after"
            f" {called('convert')} index {shlex.quote(str(source))} --out FOLDER if they have no"
            " index; to have them in one, index all tars again with --force"
        )


def append_images(
    newest: NewestVersion,
    listing: RecordListing,
    packing: Packing,
    takes_dropped: bool,
    command: Sequence[str],
) -> None:
    """Make the next version; an interrupted append continues with the same arguments.

    `takes_dropped`: also images that an earlier version has dropped.
    """
    target, manifest, folder = newest.target, newest.manifest, newest.target.folder
    refuse_inside(folder, listing.containers)
    (container,) = listing.containers
    say(f"{folder}: listing the images of {listing.dataset}")
    files = list(metered(listing.records, "listed"))
    records = [each for each in files if isinstance(each, Record)]
    findings = [each for each in files if isinstance(each, ImageDefect)]
    kept, counts = _new_records(newest, records, container, packing, takes_dropped)
    for status, count in counts.items():
        if status is not ImageStatus.NEW:
            say(f"{folder}: {plural(count, 'image')}: {status.value}")
    if not kept:
        say(f"{folder}: nothing to add; the newest version is {manifest.number}")
        return
    version = manifest.number + 1
    merged = _with_classes_of(manifest, listing, kept, findings)
    before = newest.parts()
    plan = make_plan(merged, packing, newest.free_numbers(), before)
    target.begin(plan, packing.force, version)
    write_shards(target, plan, packing)
    parts, findings = checked_parts(target, plan, packing, before, version)
    newest.publish(
        parts,
        {"added": sum(len(part.rows) for part in parts) - sum(len(part.rows) for part in before)},
        command,
        findings,
        classes=merged.classes,
        sources=tuple(dict.fromkeys((*manifest.sources, *plan.origins))),
    )
    target.clear_work()


class ImageStatus(Enum):
    """What becomes of an image that is to be appended."""

    NEW = "new"
    OTHER = "different images with names that are in use; their keys end with their CRC-32"
    PRESENT = "already there"
    DROPPED = "dropped by an earlier version; to add them again, add --allow dropped"


def _new_records(
    newest: NewestVersion,
    records: Sequence[Record],
    container: Container,
    packing: Packing,
    takes_dropped: bool,
) -> tuple[list[Record], Counter[ImageStatus]]:
    """Return the records that no version has yet, with keys that no version has."""
    # A name alone proves nothing: what would be stored of an image is compared with what is stored.
    current = _marks(shards_of(newest.source))
    marks = _marks(newest.earlier_shards()) | current
    doubtful = [record for record in records if record.key.lower() in marks]
    to_store = dict(zip(doubtful, _marks_of(doubtful, container, packing), strict=True))
    taken, kept, counts = set(marks), list[Record](), Counter[ImageStatus]()
    for record in records:
        status, key = ImageStatus.NEW, record.key
        if record in to_store:
            mark = to_store[record]
            # The same images get the same key when they are appended again.
            marked = f"{key[: MAX_KEY_BYTES - 9]}-{mark >> 32:08x}"
            same = [each for each in (key, marked) if marks.get(each.lower()) == mark]
            if not same:
                status, key = ImageStatus.OTHER, free_key((marked,), record.name, taken)
            elif same[0].lower() in current:
                status = ImageStatus.PRESENT
            else:
                status, key = ImageStatus.DROPPED, same[0]
        counts[status] += 1
        if status is ImageStatus.PRESENT or (status is ImageStatus.DROPPED and not takes_dropped):
            continue
        taken.add(key.lower())
        kept.append(record._replace(key=key))
    return kept, counts


def _marks(shards: Sequence[StoredShard]) -> dict[str, int]:
    """Return checksum and length of each stored sample, as one number, by its key."""
    marks = dict[str, int]()
    for stored in shards:
        keys = (key.lower() for key in stored.sample_keys())
        marks.update(zip(keys, image_marks(stored.rows).tolist(), strict=True))
    return marks


def _marks_of(records: Sequence[Record], container: Container, packing: Packing) -> list[int]:
    """Return checksum and length of what would be stored of each record, made side by side.

    It is 0 for an image that cannot be used, which the conversion will name.
    """
    treatment = Treatment(packing.preset, packing.exif == "apply")

    def compare(start: int) -> list[int]:
        marks = []
        for record in records[start : start + COMPARED_AT_ONCE]:
            working_on(record.name)
            try:
                image = treatment.stored(record, container)
                marks.append(image.crc << 32 | len(image.data))
            except Defect:
                marks.append(0)
        return marks

    jobs, total = range(0, len(records), COMPARED_AT_ONCE), len(records)
    return list(chain(*in_parallel(jobs, compare, packing.processes, "compared", total)))


def _with_classes_of(
    manifest: Manifest,
    listing: RecordListing,
    records: Sequence[Record],
    findings: Sequence[ImageDefect],
) -> RecordListing:
    # New classes get numbers after those that are there, and a class without new images gets none.
    used = {record.label for record in records}
    new = [name for label, name in enumerate(listing.classes) if label in used]
    merged = tuple(dict.fromkeys((*manifest.classes, *new)))
    numbers = {name: number for number, name in enumerate(merged)}
    labeled = (record._replace(label=numbers[listing.classes[record.label]]) for record in records)
    files = chain[Listed](findings, labeled)
    return replace(listing, dataset=manifest.dataset, classes=merged, records=files)
