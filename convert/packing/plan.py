"""The plan of a conversion, image by image: a pure function of raw data set and options.

The order is that of a hash of the key, the validation part of a class that of another one, or of a
hash of the bytes where images are copies; so neither depends on how the archive was listed, nor on
the number of processes. Its digest is written to the folder: it tells whether an
interrupted conversion can go on.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rackrun.convert.images.treatment import Treatment
from rackrun.convert.options import Packing
from rackrun.convert.packing.copies import SplitRows, image_marks, marks_of_copies
from rackrun.convert.readers.names import refuse_similar, refuse_unique_labels
from rackrun.convert.readers.record_table import SPLIT_NAMES, RecordTable, hash_of
from rackrun.convert.readers.records import (
    HELD_OUT,
    TEST,
    TRAIN,
    VAL,
    ImageDefect,
    Record,
    RecordListing,
    as_text,
)
from rackrun.errors import DataError, UsageError
from rackrun.shards.index import Origin, index_name, shard_name
from rackrun.terminal import say
from rackrun.units import plural

SHARD_BYTES = 64 << 20
ORDER = 0  # hashed with a key, as VAL is: it gives the place of an image in the shards
FEWEST = {TRAIN: 16, VAL: 4, TEST: 4}  # shards of a split, where there are images for them
FEWEST_SAMPLES = 64  # of a shard, unless the user asks for more shards


@dataclass(frozen=True)
class PlannedShard:
    """One tar to be written."""

    name: str
    split: str
    number: int  # within its split
    start: int  # number of its first record
    images: int


@dataclass(frozen=True)
class ShardPlan:
    """The output of a conversion, before it is made; equal plans make equal bytes."""

    listing: RecordListing
    table: RecordTable
    """The records in the order of the shards."""
    shards: tuple[PlannedShard, ...]
    treatment: Treatment

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all that decides about the output."""
        listing = self.listing
        facts = {
            "dataset": listing.dataset,
            "classes": listing.classes,
            "treatment": asdict(self.treatment),
            "needs_all": listing.needs_all,
            "usual": listing.usual,
            "origins": [asdict(origin) for origin in self.origins],
            "findings": self.findings,
            "shards": [asdict(shard) for shard in self.shards],
        }
        return sha256(json.dumps(facts).encode()).hexdigest()

    @cached_property
    def origins(self) -> tuple[Origin, ...]:
        """What the images come from; as a digest covers all records, equal ones are equal sets."""
        return tuple(
            Origin(container.name, *self.table.size_and_digest(number))
            for number, container in enumerate(self.listing.containers)
        )

    @cached_property
    def findings(self) -> list[ImageDefect]:
        """What was found while the source was listed."""
        return sorted(self.table.findings)

    def records(self, shard: PlannedShard) -> Iterator[Record]:
        """Yield the records of a shard in order."""
        return map(self.table.__getitem__, range(shard.start, shard.start + shard.images))

    def files(self, version: int) -> set[str]:
        """Return the names of all shards and indexes that a version gets."""
        splits = {shard.split for shard in self.shards}
        indexes = {index_name(self.listing.dataset, split, version) for split in splits}
        return indexes | {shard.name for shard in self.shards}


def make_plan(
    listing: RecordListing,
    packing: Packing,
    numbers: Mapping[str, int] | None = None,
    before: Sequence[SplitRows] = (),
) -> ShardPlan:
    """Return the plan of a conversion.

    For images that join a finished folder, `numbers` has by split the first that its shards get,
    and `before` are the splits; they need not have all its classes and splits.
    """
    if "similar-classes" not in packing.allow:
        refuse_similar(listing.classes)
    table = RecordTable(listing.records)
    if not len(table):
        raise DataError(f"{listing.containers[0].name}: no images in it")
    hashes = table.hashes(ORDER)
    _refuse_duplicates(table, hashes)
    if numbers is None and not listing.as_published and "unique-labels" not in packing.allow:
        counts = np.bincount(table.rows["label"]).tolist()
        named = zip(listing.classes, counts, strict=False)
        refuse_unique_labels({name: count for name, count in named if count})
    _set_splits(table, listing, packing, joins=numbers is not None, before=before)
    table.reorder(np.lexsort((hashes, table.rows["split"])))
    upright = packing.exif == "apply" and not listing.as_published
    return ShardPlan(
        listing,
        table,
        tuple(_shards(table, listing.dataset, packing, numbers)),
        Treatment(packing.preset, upright),
    )


def _refuse_duplicates(table: RecordTable, hashes: np.ndarray) -> None:
    order = np.argsort(hashes, kind="stable")  # equal keys are neighbors
    for at in np.flatnonzero(hashes[order][1:] == hashes[order][:-1]):
        first, second = table[order[at]], table[order[at + 1]]
        if first.key == second.key:
            raise DataError(
                f"{first.name} and {second.name} would both be called {first.key}; rename one"
            )


def _set_splits(
    table: RecordTable,
    listing: RecordListing,
    packing: Packing,
    joins: bool,
    before: Sequence[SplitRows],
) -> None:
    """Hold out a part of the images without a split; UsageError where none can be."""
    splits = table.rows["split"]
    free = np.flatnonzero(splits == SPLIT_NAMES.index(HELD_OUT))
    if packing.test_percent and SPLIT_NAMES.index(TEST) in splits:
        raise UsageError("--test-percent: the source has a test split; leave the option out")
    splits[free] = SPLIT_NAMES.index(TRAIN)
    if group_of := listing.group_of:
        if not len(free):
            raise UsageError(
                "--group-level and --group-column: the splits are given; leave them out"
            )
        groups = (hash_of(f"{VAL}:{as_text(group_of(table[number]))}") for number in free.tolist())
        units = np.fromiter(groups, np.uint64)
        if len(np.unique(units)) == len(units) > 1:
            raise UsageError(
                "--group-level and --group-column: each image is a group of its own; name a level "
                "or a column that several images share, or leave them out"
            )
        classes = np.zeros(len(free), int)  # drawn from all
        _hold_out(splits, Drawable(free, units, classes, classes), packing)
    elif len(free) and (packing.val_percent or packing.test_percent):
        labels = table.rows["label"][free]
        images = Drawable(free, table.hashes(VAL)[free], labels, labels)
        if not listing.as_published:
            images = _copies_as_units(images, table, listing, packing, before)
        _hold_out(splits, images, packing)
    if SPLIT_NAMES.index(VAL) not in splits and packing.val_percent and not joins:
        lack = "no class has two different images"
        why = "all images are of one group" if listing.group_of else lack
        what = listing.no_val or f"{why}, so none can be held out"
        raise UsageError(
            f"{what}: nothing to validate on; add some, or --val-percent 0 to go without"
        )
    if SPLIT_NAMES.index(TEST) not in splits and packing.test_percent:
        raise UsageError(
            "--test-percent: there is nothing to hold out for testing: the splits are given, or no "
            "class has three images"
        )


class Drawable(NamedTuple):
    """Images of which some are held out, as columns."""

    numbers: np.ndarray
    units: np.ndarray
    """Of those that stay together, the same number."""
    classes: np.ndarray
    """The class from which an image is drawn: of a unit, its first one."""
    labels: np.ndarray


def _copies_as_units(
    images: Drawable,
    table: RecordTable,
    listing: RecordListing,
    packing: Packing,
    before: Sequence[SplitRows],
) -> Drawable:
    """Return the same with one unit for images with the same bytes, also of several classes.

    Copies of images that are there `before` join their split, and are not drawn.
    """
    numbers, units, _, labels = images
    stored = [(part.split, image_marks(part.rows)) for part in before]
    known = np.concatenate([np.empty(0, np.uint64), *(marks for _, marks in stored)])
    marks = marks_of_copies(table, numbers, listing.containers, known, packing.processes)
    if not marks.any():
        return images
    what = f"{plural(int(np.count_nonzero(marks)), 'image')} with exact copies"
    say(f"{listing.dataset}: {what}: copies stay in one split")
    copied = marks > 0
    units[copied] = [hash_of(f"{VAL}:{mark}") for mark in marks[copied].tolist()]
    _, places = np.unique(units, return_inverse=True)
    first = np.full(len(units), len(listing.classes), labels.dtype)
    np.minimum.at(first, places, labels)
    joins = np.zeros(len(units), bool)
    for split, of_split in stored:
        here = copied & np.isin(marks, of_split)
        table.rows["split"][numbers[here]] = SPLIT_NAMES.index(split)
        joins |= here
    return Drawable(*(column[~joins] for column in (numbers, units, first[places], labels)))


def _hold_out(splits: np.ndarray, images: Drawable, packing: Packing) -> None:
    """Draw a part of each class, in whole units, by their hashes alone.

    With other options the same images are held out, so that accuracies can be compared.
    """
    order = np.lexsort((images.units, images.classes))
    bounds = np.flatnonzero(np.diff(images.classes[order])) + 1
    for left in np.split(order, bounds):
        total = int(np.count_nonzero(images.classes[left] == images.labels[left]))
        for split, percent in ((VAL, packing.val_percent), (TEST, packing.test_percent)):
            _, sizes = np.unique(images.units[left], return_counts=True)
            held = np.repeat(_drawn(sizes, total, percent), sizes)
            splits[images.numbers[left[held]]] = SPLIT_NAMES.index(split)
            left = left[~held]


def _drawn(sizes: np.ndarray, total: int, percent: float) -> np.ndarray:
    """Return which units come to so many percent: the first that fit, or the smallest, never all.

    At least one of two is drawn, unless percent is 0.
    """
    drawn = np.zeros(len(sizes), bool)
    wanted = min(max(round(total * percent / 100), 1), int(sizes.sum()) - 1) if percent else 0
    left = wanted
    for unit, size in enumerate(sizes.tolist()):
        if size <= left:
            drawn[unit] = True
            left -= size
        if not left:
            break
    if left == wanted > 0 and len(sizes) > 1:
        drawn[sizes.argmin()] = True
    return drawn


def _shards(
    table: RecordTable, dataset: str, packing: Packing, numbers: Mapping[str, int] | None
) -> list[PlannedShard]:
    """Cut the records of each split into runs whose lengths differ by one at most."""
    shards = list[PlannedShard]()
    mean_bytes = float(table.rows["size"].mean())
    for number, split in enumerate(SPLIT_NAMES):
        places = np.flatnonzero(table.rows["split"] == number)  # a run: the table is sorted
        if not len(places):
            continue
        count = max(round(len(places) * mean_bytes / SHARD_BYTES), 1)
        if numbers is None:
            count = _shard_count(split, len(places), count, packing)
        first = (numbers or {}).get(split, 0)
        bounds = [int(places[0]) + shard * len(places) // count for shard in range(count + 1)]
        for position, (low, high) in enumerate(pairwise(bounds)):
            name = shard_name(dataset, split, first + position)
            shards.append(PlannedShard(name, split, position, low, high - low))
    return shards


def _shard_count(split: str, images: int, by_size: int, packing: Packing) -> int:
    asked = packing.shards if split == TRAIN else 0
    if asked > images:
        raise UsageError(
            f"{plural(asked, 'shard')} for the {plural(images, 'image')} of {split} are too many"
        )
    return asked or max(by_size, min(FEWEST[split], images // FEWEST_SAMPLES))
