"""The plan of a conversion, image by image: a pure function of raw data set and options.

The order is that of a hash of (seed, key), the validation part of a class that of a hash of the
key alone; so neither depends on how the archive was listed, nor on the number of processes. Its
digest is written to the folder: it tells whether an interrupted conversion can go on.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise

import numpy as np

from rackrun.convert.images.treatment import Treatment
from rackrun.convert.options import Packing
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
from rackrun.units import plural

SHARD_BYTES = 64 << 20
FEWEST = {TRAIN: 16, VAL: 4, TEST: 4}  # shards of a split, where there are images for them
FEWEST_SAMPLES = 64  # of a shard, unless the user asks for more shards
MOST_HELD = 1.5  # times the share of images that is to be held out in whole groups


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
    seed: int
    treatment: Treatment

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all that decides about the output."""
        listing = self.listing
        facts = {
            "dataset": listing.dataset,
            "classes": listing.classes,
            "seed": self.seed,
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
    listing: RecordListing, packing: Packing, numbers: Mapping[str, int] | None = None
) -> ShardPlan:
    """Return the plan of a conversion.

    For images that join a finished folder, `numbers` has by split the first that its shards get;
    they need not have all its classes and splits.
    """
    if "similar-classes" not in packing.allow:
        refuse_similar(listing.classes)
    table = RecordTable(listing.records)
    if not len(table):
        raise DataError(f"{listing.containers[0].name}: no images in it")
    hashes = table.hashes(packing.seed)
    _refuse_duplicates(table, hashes)
    if numbers is None and not listing.as_published and "unique-labels" not in packing.allow:
        counts = np.bincount(table.rows["label"]).tolist()
        named = zip(listing.classes, counts, strict=False)
        refuse_unique_labels({name: count for name, count in named if count})
    _set_splits(table, listing, packing, joins=numbers is not None)
    table.reorder(np.lexsort((hashes, table.rows["split"])))
    upright = packing.exif == "apply" and not listing.as_published
    return ShardPlan(
        listing,
        table,
        tuple(_shards(table, listing.dataset, packing, numbers)),
        packing.seed,
        Treatment(packing.preset, upright),
    )


def _refuse_duplicates(table: RecordTable, hashes: np.ndarray) -> None:
    order = np.argsort(hashes, kind="stable")  # equal keys are neighbours
    for at in np.flatnonzero(hashes[order][1:] == hashes[order][:-1]):
        first, second = table[order[at]], table[order[at + 1]]
        if first.key == second.key:
            raise DataError(
                f"{first.name} and {second.name} would both be called {first.key}; rename one"
            )


def _set_splits(table: RecordTable, listing: RecordListing, packing: Packing, joins: bool) -> None:
    """Hold out a part of the images without a split; UsageError where none can be."""
    splits = table.rows["split"]
    free = np.flatnonzero(splits == SPLIT_NAMES.index(HELD_OUT))
    if packing.test_percent and SPLIT_NAMES.index(TEST) in splits:
        raise UsageError("--test-percent: the source has a test split; leave the option out")
    if listing.group_of:
        _hold_out_groups(table, free, listing.group_of, packing)
    else:
        _hold_out(table, free, packing)
    if SPLIT_NAMES.index(VAL) not in splits and packing.val_percent and not joins:
        why = "all images are of one group" if listing.group_of else "no class has two images"
        what = listing.no_val or f"{why}, so none can be held out"
        raise UsageError(
            f"{what}: nothing to validate on; add some, or --val-percent 0 to go without"
        )
    if SPLIT_NAMES.index(TEST) not in splits and packing.test_percent:
        raise UsageError(
            "--test-percent: there is nothing to hold out for testing: the splits are given, or no "
            "class has three images"
        )


def _hold_out(table: RecordTable, free: np.ndarray, packing: Packing) -> None:
    """Draw a part of each class, by a hash of the keys alone.

    With another seed the same images are held out, so that accuracies can be compared.
    """
    labels = table.rows["label"][free]
    order = np.lexsort((table.hashes(VAL)[free], labels))
    ends = np.flatnonzero(np.diff(labels[order])) + 1
    for group in np.split(free[order], ends):
        val = _held_out(len(group), packing.val_percent)
        test = min(val + _held_out(len(group), packing.test_percent), len(group) - 1)
        table.rows["split"][group[:val]] = SPLIT_NAMES.index(VAL)
        table.rows["split"][group[val:test]] = SPLIT_NAMES.index(TEST)
        table.rows["split"][group[test:]] = SPLIT_NAMES.index(TRAIN)


def _held_out(images: int, percent: float) -> int:
    # At least one of two, unless percent is 0.
    count = max(round(images * percent / 100), 1) if percent else 0
    return min(count, images - 1)


def _hold_out_groups(
    table: RecordTable, free: np.ndarray, group_of: Callable[[Record], str], packing: Packing
) -> None:
    """Draw whole groups, by a hash of their names, until their images are the percentage asked for.

    A group that would be far too many is passed over, and one group at least stays in train.
    """
    if not len(free):
        raise UsageError("--group-level and --group-column: the splits are given; leave them out")
    groups = [group_of(table[number]) for number in free]
    sizes = Counter(groups)
    order = sorted(sizes, key=lambda group: hash_of(f"{VAL}:{as_text(group)}"))
    splits = dict[str, str]()
    for split, percent in ((VAL, packing.val_percent), (TEST, packing.test_percent)):
        wanted, held = sizes.total() * percent / 100, 0
        left = [group for group in order if group not in splits]
        for group in left if wanted else ():
            if held < wanted and held + sizes[group] <= MOST_HELD * wanted and len(left) > 1:
                splits[group] = split
                held += sizes[group]
        if wanted and not held and len(left) > 1:
            splits[min(left, key=lambda group: sizes[group])] = split
    drawn = [SPLIT_NAMES.index(splits.get(group, TRAIN)) for group in groups]
    table.rows["split"][free] = drawn


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
