"""The plan of a conversion, image by image: a pure function of raw data set and options.

The order is that of a hash of (seed, key), the validation part of a class that of a hash of the
key alone; so neither depends on how the archive was listed, nor on the number of processes. The
plan is a text file, its head and one line per image, from which every worker reads its part:
1.3 million images take 300 MB while they are listed, and next to nothing afterwards.
"""

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b, sha256
from itertools import pairwise
from pathlib import Path

from rackrun.atomic import atomic_write, translated_os_errors
from rackrun.convert.images.resize import Preset
from rackrun.convert.images.treatment import Treatment
from rackrun.convert.options import Packing
from rackrun.convert.readers.names import refuse_similar, refuse_unique_labels
from rackrun.convert.readers.records import (
    HELD_OUT,
    ImageDefect,
    Record,
    RecordListing,
    as_text,
)
from rackrun.errors import DataError, UsageError
from rackrun.shards.index import Origin, index_name, shard_name
from rackrun.terminal import clean, say
from rackrun.units import first_few, plural

TRAIN, VAL, TEST = "train", "val", "test"
SPLITS = {  # as they are called in names of folders, tars and tables
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
HASH_BYTES = 8  # two of 1.3 million keys share them once in 20 million plans: keys decide then
SHARD_BYTES = 64 << 20
FEWEST = {TRAIN: 16, VAL: 4, TEST: 4}  # shards of a split, where there are images for them
MOST_HELD = 1.5  # times the share of images that is to be held out in whole groups
NAMED = 5  # classes that a line names
FEWEST_SAMPLES = 64  # of a shard, unless the user asks for more shards

Parts = dict[str, list[bytes]]
"""Per split, entries: the hash that gives the order, then the record's line."""


@dataclass(frozen=True)
class PlannedShard:
    """One tar to be written."""

    name: str
    split: str
    number: int  # within its split
    images: int
    start: int  # of its lines in the plan file, in bytes
    length: int


@dataclass(frozen=True)
class ShardPlan:
    """The output of a conversion, before it is made; equal plans make equal bytes."""

    dataset: str
    classes: tuple[str, ...]
    seed: int
    preset: Preset
    needs_all: bool
    usual: tuple[str, ...]
    upright: bool
    as_published: bool
    origins: tuple[Origin, ...]
    findings: tuple[ImageDefect, ...]
    shards: tuple[PlannedShard, ...]
    lines_sha256: str
    joins: bool = False
    """True for images that join a finished folder, and need not have all its classes and splits."""

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the head, which identifies the plan."""
        return sha256(self.head()).hexdigest()

    @property
    def treatment(self) -> Treatment:
        """How images become what is stored."""
        return Treatment(self.preset, self.upright)

    @property
    def images(self) -> int:
        """Return the number of images to convert."""
        return sum(shard.images for shard in self.shards)

    def head(self) -> bytes:
        """Return the plan but for its lines, as the first line of the file."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, head: bytes) -> "ShardPlan":
        """Parse the first line of a plan file; raise DataError if it is none."""
        try:
            fields = json.loads(head)
            return cls(
                **fields
                | {
                    "preset": Preset(**fields["preset"]),
                    "classes": tuple(fields["classes"]),
                    "usual": tuple(fields["usual"]),
                    "origins": tuple(Origin(**origin) for origin in fields["origins"]),
                    "findings": tuple(ImageDefect(*finding) for finding in fields["findings"]),
                    "shards": tuple(PlannedShard(**shard) for shard in fields["shards"]),
                }
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError(
                "not the plan of a conversion; empty the folder and convert again"
            ) from None

    def files(self) -> set[str]:
        """Return the names of all shards and indexes."""
        indexes = {index_name(self.dataset, shard.split) for shard in self.shards}
        return indexes | {shard.name for shard in self.shards}


def make_plan(listing: RecordListing, packing: Packing) -> tuple[ShardPlan, list[bytes]]:
    """Return the plan, and the lines of its records in the order of the shards."""
    if "similar-classes" not in packing.allow:
        refuse_similar(listing.classes)
    if listing.group_of:
        grouped = _held_out_by_group(listing.records, listing.group_of, packing)
        listing = replace(listing, records=grouped)
    parts, mean_bytes = _parts(listing, packing)
    _refuse_duplicates(parts)
    if VAL not in parts and packing.val_percent and not listing.joins:
        why = "all images are of one group" if listing.group_of else "no class has two images"
        what = listing.no_val or f"{why}, so none can be held out"
        raise UsageError(
            f"{what}: nothing to validate on; add some, or --val-percent 0 to go without"
        )
    if TEST not in parts and packing.test_percent:
        raise UsageError(
            "--test-percent: there is nothing to hold out for testing: the splits are given, or no "
            "class has three images"
        )
    shards, lines = _shards(listing, parts, mean_bytes, packing)
    digest = sha256()
    for block in lines:
        digest.update(block)
    plan = ShardPlan(
        dataset=listing.dataset,
        classes=listing.classes,
        seed=packing.seed,
        preset=packing.preset,
        needs_all=listing.needs_all,
        usual=listing.usual,
        upright=packing.exif == "apply" and not listing.as_published,
        as_published=listing.as_published,
        origins=tuple(container.origin() for container in listing.containers),
        findings=tuple(sorted(listing.findings)),
        shards=tuple(shards),
        lines_sha256=digest.hexdigest(),
        joins=listing.joins,
    )
    return plan, lines


def save_plan(path: Path, plan: ShardPlan, lines: list[bytes]) -> None:
    """Write the plan file."""
    with atomic_write(path) as file, translated_os_errors(path):
        file.write(plan.head())
        file.writelines(lines)


def load_plan(path: Path) -> ShardPlan:
    """Read the plan in a file, without its lines."""
    try:
        return ShardPlan.parse(head_of(path))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def head_of(path: Path) -> bytes:
    """Return the first line of a plan file, which identifies the plan."""
    with path.open("rb") as file:
        return file.readline()


def records_of(path: Path, shard: PlannedShard) -> Iterator[Record]:
    """Yield the records of one shard, in order."""
    with path.open("rb") as file:
        head_length = len(file.readline())
        file.seek(head_length + shard.start)
        for _ in range(shard.images):
            yield Record.parse(file.readline())


def _parts(listing: RecordListing, packing: Packing) -> tuple[Parts, float]:
    groups: dict[tuple[str, int], list[bytes]] = defaultdict(list)
    total = 0
    for record in listing.records:
        total += record.size
        # The hash goes first, so that sorting the entries as bytes shuffles the images. Bytes, not
        # objects: there may be millions of them.
        entry = _hash(f"{packing.seed}:{record.key}") + record.line().encode() + b"\n"
        groups[record.split, record.label].append(entry)
    if not groups:
        raise DataError(f"{listing.containers[0].origin().name}: no images in it")
    is_given = not listing.group_of and any(split == TEST for split, _ in groups)
    if packing.test_percent and is_given:
        raise UsageError("--test-percent: the source has a test split; leave the option out")
    is_new = not (listing.joins or listing.as_published)
    if is_new and "unique-labels" not in packing.allow:
        refuse_unique_labels(_images_by_class(groups, listing.classes))
    parts: Parts = defaultdict(list)
    labels = defaultdict[str, set[int]](set)
    for (split, label), entries in groups.items():
        if split:
            parts[split] += entries
            labels[split].add(label)
        else:
            # By a hash of the key alone: the same images are held out with another seed, so that
            # accuracies can be compared.
            entries.sort(key=lambda entry: _hash(f"{VAL}:{_key(entry)}"))
            val = _held_out(len(entries), packing.val_percent)
            test = min(val + _held_out(len(entries), packing.test_percent), len(entries) - 1)
            parts[VAL] += entries[:val]
            parts[TEST] += entries[val:test]
            parts[TRAIN] += entries[test:]
            labels[TRAIN].add(label)
            labels[VAL] |= {label} if val else set()
            labels[TEST] |= {label} if test > val else set()
    for entries in parts.values():
        entries.sort()
    if is_new:
        present = {split: labels[split] for split in parts if parts[split]}
        say_missing_classes(present, listing.classes)
    mean = total / max(sum(len(entries) for entries in parts.values()), 1)
    return {split: entries for split, entries in parts.items() if entries}, mean


def _images_by_class(
    groups: Mapping[tuple[str, int], Sequence[bytes]], classes: Sequence[str]
) -> Counter[str]:
    images = Counter[str]()
    for (_, label), entries in groups.items():
        images[classes[label]] += len(entries)
    return images


def say_missing_classes(labels: Mapping[str, set[int]], classes: Sequence[str]) -> None:
    """Say of each split which classes it has no image of."""
    for split, present in sorted(labels.items()):
        missing = [name for number, name in enumerate(classes) if number not in present]
        if missing:
            count = f"{len(missing):,} of {plural(len(classes), 'class', 'classes')}"
            say(clean(f"{split} has no image of {count}: {first_few(missing, NAMED)}"))


def _held_out_by_group(
    records: Iterator[Record], group_of: Callable[[Record], str], packing: Packing
) -> Iterator[Record]:
    """Yield the records with their splits: the images of a group are all in one.

    Groups are drawn by a hash of their names until their images are the percentage asked for; one
    that would be far too many is passed over, and one group at least stays in train.
    """
    listed = list(records)
    sizes = Counter(group_of(record) for record in listed if record.split == HELD_OUT)
    if not sizes:
        raise UsageError("--group-level and --group-column: the splits are given; leave them out")
    order = sorted(sizes, key=lambda group: _hash(f"{VAL}:{as_text(group)}"))
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
    for record in listed:
        if record.split == HELD_OUT:
            record = record._replace(split=splits.get(group_of(record), TRAIN))
        yield record


def _held_out(images: int, percent: float) -> int:
    # At least one of two, unless percent is 0.
    count = max(round(images * percent / 100), 1) if percent else 0
    return min(count, images - 1)


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=HASH_BYTES).digest()


def _key(entry: bytes) -> str:
    # The key is the first string in the record's line, and holds no quote.
    return entry[HASH_BYTES:].split(b'"', 2)[1].decode()


def _refuse_duplicates(parts: Parts) -> None:
    # Equal keys have equal hashes, so in the merged order they are neighbours.
    for this, following in pairwise(heapq.merge(*parts.values())):
        if this[:HASH_BYTES] == following[:HASH_BYTES] and _key(this) == _key(following):
            first, second = (Record.parse(entry[HASH_BYTES:]).name for entry in (this, following))
            raise DataError(f"{first} and {second} would both be called {_key(this)}; rename one")


def _shards(
    listing: RecordListing, parts: Parts, mean_bytes: float, packing: Packing
) -> tuple[list[PlannedShard], list[bytes]]:
    """Return the shards, and the lines of each as one block."""
    shards, lines, offset = list[PlannedShard](), list[bytes](), 0
    # Sorted: the plan's bytes are its identity, by which an interrupted conversion is known again.
    for split in sorted(parts):
        images = len(parts[split])
        count = _by_size(images, mean_bytes)
        if not listing.joins:
            count = _shard_count(split, images, count, packing)
        # Runs of images whose lengths differ by one at most.
        bounds = [shard * images // count for shard in range(count + 1)]
        for number, (low, high) in enumerate(pairwise(bounds)):
            block = b"".join(entry[HASH_BYTES:] for entry in parts[split][low:high])
            name, extent = shard_name(listing.dataset, split, number), (offset, len(block))
            shards.append(PlannedShard(name, split, number, high - low, *extent))
            lines.append(block)
            offset += len(block)
    return shards, lines


def _shard_count(split: str, images: int, by_size: int, packing: Packing) -> int:
    asked = packing.shards if split == TRAIN else 0
    if asked > images:
        raise UsageError(
            f"{plural(asked, 'shard')} for the {plural(images, 'image')} of {split} are too many"
        )
    fewest = min(FEWEST.get(split, 1), images // FEWEST_SAMPLES)
    return asked or max(by_size, fewest)


def _by_size(images: int, mean_bytes: float) -> int:
    return max(round(images * mean_bytes / SHARD_BYTES), 1)
