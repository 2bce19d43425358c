"""More images for a finished shard folder: a conversion whose plan begins where the last one ended.

    source -> listing -> what no version has yet -> plan -> shards -> copies, leaks -> next version

No file that a version has is written again.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from convert.folder import listing as listing_of_folder
from convert.images.transcoder import library
from convert.images.treatment import Treatment
from convert.options import Packing
from convert.packing.pack import refuse_inside, write_version
from convert.packing.plan import VAL, make_plan
from convert.packing.sidecars import write_sidecars
from convert.packing.stored_samples import keys_of, marks_of, rows_of
from convert.packing.workers import in_parallel, working_on
from convert.progress import Progress, meter, metered
from convert.readers.names import free_key
from convert.readers.records import Container, Defect, Record, RecordListing
from convert.table import ImageTable
from convert.versions.parent import Parent
from rackrun.commandline.options import Examples, Positional
from rackrun.terminal import say
from rackrun.units import plural

TABLES = (".csv", ".parquet", ".pq")
COMPARED_AT_ONCE = 64  # images
DEFAULT_VAL_PERCENT = 10.0


@dataclass(frozen=True)
class Append:
    """Add images to a finished shard folder as its next version; its tars stay as they are."""

    examples: ClassVar[Examples] = (
        ("{prog} photos data/shards", "all images of photos/ that are not in it yet"),
        ("{prog} new.csv data/shards --root photos", "those that a table lists"),
        ("{prog} new.zip data/shards --val-percent 0", "a zip of class folders; all for training"),
    )

    source: Positional[Path]
    """Folder, zip or tar of class folders, or a CSV or Parquet file of paths and labels."""
    data: Positional[Path]
    """Finished shard folder."""
    root: Path | None = None
    """Of a table: folder that paths are relative to; by default the table's."""
    path_column: str = "path"
    """Of a table: column with the images' paths."""
    label_column: str = "label"
    """Of a table: column with their classes, names or numbers."""
    split_column: str = "split"
    """Of a table: column with train, val or test; without it a part of each class is held out."""
    val_percent: float | None = None
    """Percent of each class of the new images held out, unless SOURCE has a validation split;
    default: 10 if DATA has one, else 0."""
    test_percent: float = 0.0
    """Percent of each class of the new images set aside as the split test."""
    exif: Literal["apply", "ignore"] = "apply"
    """apply: rotate JPEGs by their EXIF orientation."""
    check: Literal["structure", "decode"] = "structure"
    """decode: also decode every image, at some milliseconds of CPU each."""
    allow_left_out: int | None = None
    """Damaged images that may be left out; default: 1 %, or 10 % of a small set."""
    allow: tuple[Literal["leaks", "similar-classes", "dropped"], ...] = ()
    """leaks: copies of an image in several splits. similar-classes: class names that differ only by
    case, Unicode form or leading zeros. dropped: images that were dropped before. Repeatable."""
    follow_links: bool = False
    """Also follow symbolic links that lead out of SOURCE."""
    workers: int = 0
    """Number of processes; 0: one per core."""
    force: bool = False
    """Give up another change of DATA that was interrupted."""

    def run(self) -> None:
        """Append; what is interrupted goes on with the same command."""
        with Parent.locked(self.data) as parent:
            packing = self._packing(parent)
            listing = self._listing()
            refuse_inside(parent.target.folder, listing.containers)
            if packing.tiles and not packing.preset.encodes_all:
                library()  # or an error, before anything is read
            say(f"{self.data}: listing the images of {self.source}")
            records = list(metered(listing.records, "listed"))
            container = listing.containers[0]
            upright = packing.exif == "apply"
            treatment = Treatment(packing.preset, packing.tiles, packing.check, upright)
            kept, counts = _new_records(parent, records, container, treatment, self, packing)
            for line in _remarks(counts):
                say(f"{self.data}: {line}")
            if not kept:
                say(f"{self.data}: nothing to add; the newest version is {parent.manifest.number}")
                if parent.manifest.sidecars:  # which an append that was killed may have left out
                    write_sidecars(parent.target.folder, packing.processes, only_missing=True)
                return
            merged = _with_classes_of(parent.manifest.classes, listing, kept)
            merged = replace(merged, dataset=parent.manifest.dataset)
            plan, lines = make_plan(merged, packing, parent.starts())
            plan = parent.planned(plan)
            write_version(parent.target, plan, lines, container, packing, parent.source)
            new = merged.classes[len(parent.manifest.classes) :]
            more = f"; new classes: {', '.join(new)}" if new else ""
            say(f"{self.data}: version {plan.version} is the newest one{more}")

    def _packing(self, parent: Parent) -> Packing:
        """Return the options of the conversion that made the folder, with those of this one."""
        manifest = parent.manifest
        holds_out = any(split.name == VAL for split in manifest.splits)
        default = min(DEFAULT_VAL_PERCENT, 90 - self.test_percent) if holds_out else 0.0
        return Packing(
            preset=parent.preset,
            seed=manifest.seed,
            tiles=manifest.tiles,
            extension=_extension(parent),
            val_percent=default if self.val_percent is None else self.val_percent,
            test_percent=self.test_percent,
            exif=self.exif,
            check=self.check,
            allow_left_out=self.allow_left_out,
            allow=tuple(each for each in self.allow if each != "dropped"),
            workers=self.workers,
            force=self.force,
        )

    def _listing(self) -> RecordListing:
        """List the images of the source."""
        if self.source.suffix.lower() not in TABLES or self.source.is_dir():
            return listing_of_folder(self.source, "", self.follow_links, fewest=1)
        columns = (self.path_column, self.label_column, self.split_column)
        return ImageTable(self.source, self.data, self.root, *columns).listing()


class Known(Enum):
    """What is known of an image before it is appended."""

    NEW = "new"
    OTHER = "other images of names that are taken; their keys end with their CRC-32"
    PRESENT = "are in it already"
    DROPPED = "were dropped by an earlier version; to take them again, add --allow dropped"


class _Compared(NamedTuple):
    """The answer of a worker: for each record of a job, the mark of what would be stored."""

    job: int
    marks: list[int]


def _new_records(
    parent: Parent,
    records: Sequence[Record],
    container: Container,
    treatment: Treatment,
    options: Append,
    packing: Packing,
) -> tuple[list[Record], Counter[Known]]:
    """Return the records that no version has yet, with keys that no version has.

    A name alone proves nothing: what would be stored of an image is compared with what is stored.
    """
    marks, current = _marks(parent, packing.processes)
    doubtful = [record for record in records if record.key.lower() in marks]
    stored = dict[Record, int]()
    if doubtful:
        compared = _marks_of(doubtful, container, treatment, packing.processes)
        stored = dict(zip(doubtful, compared, strict=True))
    taken = set(marks)
    kept, counts = list[Record](), Counter[Known]()
    for record in records:
        earlier, key = _known(record, stored.get(record), marks, current)
        counts[earlier] += 1
        if earlier is Known.PRESENT or (
            earlier is Known.DROPPED and "dropped" not in options.allow
        ):
            continue
        if earlier is Known.OTHER:
            key = free_key((key,), record.name, taken)
        taken.add(key.lower())
        kept.append(record._replace(key=key))
    return kept, counts


def _known(
    record: Record, mark: int | None, marks: Mapping[str, int], current: set[str]
) -> tuple[Known, str]:
    """Return what is known of an image, and the key for it: with its CRC-32 if that is taken."""
    if mark is None:
        return Known.NEW, record.key
    marked = f"{record.key[:81]}-{mark >> 32:08x}"
    for key in (record.key, marked):
        if marks.get(key.lower()) == mark:
            return (Known.PRESENT if key.lower() in current else Known.DROPPED), key
    return Known.OTHER, marked


def _marks(parent: Parent, workers: int) -> tuple[dict[str, int], set[str]]:
    """Return the mark of each sample of all versions by its key, and the keys of the newest."""
    stored = list(parent.stored())
    keys = keys_of([(source, each) for source, each, _ in stored], workers)
    marks, current = dict[str, int](), set[str]()
    for source, each, is_newest in stored:
        numbers = marks_of(rows_of(source, each))
        shard_keys = [key.lower() for key in keys[each.shard.name][1]]
        marks.update(zip(shard_keys, numbers, strict=True))
        if is_newest:
            current.update(shard_keys)
    return marks, current


def _marks_of(
    records: Sequence[Record], container: Container, treatment: Treatment, workers: int
) -> list[int]:
    """Return checksum and length of what would be stored of each record, made side by side.

    It is 0 for an image that cannot be used, which the conversion will name.
    """
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
    steps = in_parallel(jobs, compare, workers)
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


def _remarks(counts: Counter[Known]) -> Iterator[str]:
    """Yield what became of images that are not simply new."""
    for kind, count in counts.items():
        if kind is not Known.NEW:
            yield f"{plural(count, 'image')}: {kind.value}"


def _extension(parent: Parent) -> Literal["jpg", "true"]:
    """Return how images are called in the shards: true if one that is no JPEG is called so."""
    for split in parent.manifest.splits:
        rows = parent.source.index(split.name)
        others = rows[rows["format"] != b"jpg"]
        if len(others):
            row = others[0]
            shard, start = split.shards[int(row["shard"])], int(row["image_offset"]) - 512
            name = bytes(parent.source.read(shard, start, 100)).rstrip(b"\0")
            return "jpg" if name.lower().endswith((b".jpg", b".jpeg")) else "true"
    return "jpg"
