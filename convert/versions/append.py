"""More images for a finished shard folder, or more tars for a folder of other programs' tars.

    listing -> what no version has yet -> converted into DATA/.appending -> its shards get the next
    free numbers in DATA -> copies, leaks -> next version

No file that a version has is written again.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

from rackrun.atomic import translated_os_errors
from rackrun.commandline.options import Examples, Positional
from rackrun.contract.files import MANIFEST_NAME
from rackrun.convert.folder import listing as listing_of_folder
from rackrun.convert.images.resize import Preset
from rackrun.convert.images.treatment import Treatment
from rackrun.convert.options import Packing
from rackrun.convert.packing.copies import image_marks
from rackrun.convert.packing.output_folder import report_name
from rackrun.convert.packing.pack import pack, refuse_inside
from rackrun.convert.packing.plan import VAL
from rackrun.convert.packing.stored_samples import StoredShard, shards_of
from rackrun.convert.packing.workers import ReportProgress, in_parallel, working_on
from rackrun.convert.progress import Progress, metered
from rackrun.convert.readers.names import free_key
from rackrun.convert.readers.records import Container, Defect, Record, RecordListing
from rackrun.convert.readers.webdataset_tars import LABEL_FIELD
from rackrun.convert.table import Columns, ImageTable
from rackrun.convert.versions.append_tars import append_tars, holds_tars, listing_of_tars
from rackrun.convert.versions.version import NewestVersion, SplitChange
from rackrun.errors import DataError, UsageError
from rackrun.shards.index import Manifest, shard_name
from rackrun.shards.open import open_source
from rackrun.shards.source import Source
from rackrun.shards.writer import MAX_KEY_BYTES
from rackrun.terminal import say
from rackrun.units import plural

TABLES = (".csv", ".parquet", ".pq")
DEFAULT_VAL_PERCENT = 10.0
OF_IMAGES = ("test_percent", "exif")
"""Options that tars of other programs do not have."""
COMPARED_AT_ONCE = 64  # images
WORK = ".appending"  # the folder of a conversion whose shards join DATA at its end


@dataclass(frozen=True)
class Append:
    """Add images to a finished shard folder as its next version; its tars stay as they are."""

    examples: ClassVar[Examples] = (
        ("{prog} photos data/shards", "all images of photos/ that are not in it yet"),
        ("{prog} new.csv data/shards --root photos", "those that a table lists"),
        ("{prog} new.zip data/shards --val-percent 0", "a zip of class folders; all for training"),
        ("{prog} tars/ tars/", "tars of other programs that have come into their folder"),
    )

    source: Positional[Path]
    """Folder, zip or tar of class folders; CSV or Parquet file of paths and labels; or, for a
    folder of other programs' tars, more of these."""
    data: Positional[str]
    """Finished shard folder."""
    columns: Columns = field(default_factory=Columns)
    val_percent: float | None = None
    """Percent of each class of the new images held out, unless SOURCE has a validation split;
    default: 10 if DATA has one, else 0."""
    test_percent: float = 0.0
    """Percent of each class of the new images set aside as the split test."""
    split: str = ""
    """Of other programs' tars: train, val or test; by default from each tar's name."""
    label_field: str = LABEL_FIELD
    """Of other programs' tars: field of .json members that holds the class."""
    exif: Literal["apply", "ignore"] = "apply"
    """apply: turn images upright by their EXIF or XMP."""
    allow_left_out: int | None = None
    """Damaged images that may be left out; default: 1 %, or 10 % of a small set."""
    allow: tuple[Literal["leaks", "similar-classes", "split-names", "dropped"], ...] = ()
    """leaks: copies of an image in several splits. similar-classes: class names that differ only by
    case, Unicode form or leading zeros. split-names: classes called train, val, test or the like.
    dropped: images that were dropped before. Repeatable."""
    exclude: tuple[str, ...] = ()
    """Files and folders to leave out, by name or path in SOURCE, with * and ?. Repeatable."""
    workers: int = 0
    """Number of processes; 0: one per core."""
    force: bool = False
    """Give up another append to DATA that was interrupted."""

    def run(self) -> None:
        """Append; what is interrupted goes on with the same command."""
        with NewestVersion.locked(self.data) as newest:
            packing = self._packing(newest.manifest)
            command = ("append", str(self.source), self.data)
            takes_dropped = "dropped" in self.allow
            if not holds_tars(self.source):
                append_images(newest, self._listing(), packing, takes_dropped, command)
                return
            for name in OF_IMAGES:
                if getattr(self, name) != getattr(Append, name):
                    option = name.replace("_", "-")
                    raise UsageError(f"--{option}: tars are added as they are; leave it out")
            packing = replace(packing, val_percent=self.val_percent or 0.0)
            listing = listing_of_tars(newest, self.source, self.split)
            append_tars(newest, listing, self.label_field, packing, takes_dropped, command)

    def _packing(self, manifest: Manifest) -> Packing:
        """Return the options of the conversion that made the folder, with those of this one."""
        holds_out = any(split.name == VAL for split in manifest.splits)
        default = min(DEFAULT_VAL_PERCENT, 90 - self.test_percent) if holds_out else 0.0
        return Packing(
            preset=Preset.of(manifest),
            seed=manifest.seed,
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
                "",
                fewest=1,
                may_be_splits="split-names" in self.allow,
                exclude=self.exclude,
            )
        packing = Packing(allow_left_out=self.allow_left_out)
        return ImageTable(self.source, Path(self.data), self.columns, packing=packing).listing()


def append_images(
    newest: NewestVersion,
    listing: RecordListing,
    packing: Packing,
    takes_dropped: bool,
    command: Sequence[str],
) -> None:
    """Make the next version; what is interrupted goes on with the same arguments.

    `takes_dropped`: also images that an earlier version has dropped.
    """
    folder, manifest = newest.target.folder, newest.manifest
    refuse_inside(folder, listing.containers)
    _tidy_up(folder, manifest)
    (container,) = listing.containers
    say(f"{folder}: listing the images of {listing.dataset}")
    records = list(metered(listing.records, "listed"))
    kept, counts = _new_records(newest, records, container, packing, takes_dropped)
    for status, count in counts.items():
        if status is not ImageStatus.NEW:
            say(f"{folder}: {plural(count, 'image')}: {status.value}")
    if not kept:
        say(f"{folder}: nothing to add; the newest version is {manifest.number}")
        return
    merged = _with_classes_of(manifest.classes, listing, kept)
    pack(replace(merged, dataset=manifest.dataset, joins=True), packing, folder / WORK)
    added = open_source(str(folder / WORK))
    changes, moves = _numbered(newest, added)
    classes, joined = added.manifest.classes, newest.joined(changes)
    names = {record.key: record.name for record in kept}
    found = newest.refuse_leaks(joined, classes, packing, moves, names)
    for name, path in moves.items():
        _move(path, folder / name)
    report = Counter(manifest.report) + Counter(added.manifest.report)
    report.update(finding.kind for finding in found)
    version = newest.publish(
        joined,
        {"added": sum(split.samples for split in added.manifest.splits)},
        command,
        classes=classes,
        sources=tuple(dict.fromkeys((*manifest.sources, *added.manifest.sources))),
        report=dict(sorted(report.items())),
    )
    _tidy_up(folder, version)
    newest.say_added(version)


def _tidy_up(folder: Path, version: Manifest) -> None:
    """Remove the folder of a conversion whose shards a version has, also after a kill."""
    work = folder / WORK
    if not (work / MANIFEST_NAME).exists():
        return
    listed = {shard.sha256 for split in version.splits for shard in split.shards}
    if all(stored.shard.sha256 in listed for stored in shards_of(open_source(str(work)))):
        if (work / report_name(1)).exists():
            (work / report_name(1)).replace(folder / report_name(version.number))
        shutil.rmtree(work)


class ImageStatus(Enum):
    """What becomes of an image that is to be appended."""

    NEW = "new"
    OTHER = "other images of names that are taken; their keys end with their CRC-32"
    PRESENT = "are in it already"
    DROPPED = "were dropped by an earlier version; to take them again, add --allow dropped"


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
    compared = _marks_of(doubtful, container, packing) if doubtful else []
    to_store = dict(zip(doubtful, compared, strict=True))
    taken = set(marks)
    kept, counts = list[Record](), Counter[ImageStatus]()
    for record in records:
        status, key = _status(record, to_store.get(record), marks, current)
        counts[status] += 1
        if status is ImageStatus.PRESENT or (status is ImageStatus.DROPPED and not takes_dropped):
            continue
        if status is ImageStatus.OTHER:
            key = free_key((key,), record.name, taken)
        taken.add(key.lower())
        kept.append(record._replace(key=key))
    return kept, counts


def _status(
    record: Record, mark: int | None, marks: dict[str, int], current: dict[str, int]
) -> tuple[ImageStatus, str]:
    if mark is None:
        return ImageStatus.NEW, record.key
    # The same images get the same key when they are appended again.
    marked = f"{record.key[: MAX_KEY_BYTES - 9]}-{mark >> 32:08x}"
    for key in (record.key, marked):
        if marks.get(key.lower()) == mark:
            return (ImageStatus.PRESENT if key.lower() in current else ImageStatus.DROPPED), key
    return ImageStatus.OTHER, marked


def _marks(shards: Iterator[StoredShard] | list[StoredShard]) -> dict[str, int]:
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

    def compare(start: int, report: ReportProgress) -> list[int]:
        marks = []
        for record in records[start : start + COMPARED_AT_ONCE]:
            working_on(record.name)
            try:
                image = treatment.stored(record, container)
                marks.append(image.crc << 32 | len(image.data))
            except Defect:
                marks.append(0)
            report(Progress(1))
        return marks

    jobs, total = range(0, len(records), COMPARED_AT_ONCE), len(records)
    marks = in_parallel(jobs, compare, packing.processes, "compared", total)
    return list(chain.from_iterable(marks))


def _with_classes_of(
    classes: tuple[str, ...], listing: RecordListing, records: Sequence[Record]
) -> RecordListing:
    # New classes get numbers after those that are there, and a class without new images gets none.
    used = {record.label for record in records}
    new = [name for label, name in enumerate(listing.classes) if label in used]
    merged = tuple(dict.fromkeys((*classes, *new)))
    numbers = {name: number for number, name in enumerate(merged)}
    labelled = (record._replace(label=numbers[listing.classes[record.label]]) for record in records)
    return replace(listing, classes=merged, records=labelled)


def _numbered(
    newest: NewestVersion, added: Source
) -> tuple[dict[str, SplitChange], dict[str, Path]]:
    """Return the shards of a converted folder under free names, and by name where they lie."""
    dataset, numbers = newest.manifest.dataset, newest.free_numbers()
    changes, moves = dict[str, SplitChange](), dict[str, Path]()
    for split in added.manifest.splits:
        shards = []
        for number, shard in enumerate(split.shards, numbers[split.name]):
            name = shard_name(dataset, split.name, number)
            shards.append(replace(shard, name=name))
            moves[name] = newest.target.folder / WORK / shard.name
        changes[split.name] = SplitChange(shards, added.index(split.name))
    return changes, moves


def _move(source: Path, target: Path) -> None:
    """Give a tar its place; an interrupted append may have done so already."""
    if source.exists() and target.exists():
        raise UsageError(f"{target}: no conversion here has made it; move it elsewhere")
    if source.exists():
        with translated_os_errors(target):
            source.rename(target)
    elif not target.exists():
        raise DataError(f"{source}: has vanished; type the command again with --force")
