"""What differs between two versions of a shard folder, or two folders: sample by sample."""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import ClassVar, NamedTuple

from rackrun.commandline.options import Examples, Positional
from rackrun.convert.packing.copies import image_marks
from rackrun.convert.packing.stored_samples import StoredShard, keys_of, shards_of
from rackrun.machine import core_count
from rackrun.shards.open import open_source
from rackrun.shards.source import Source
from rackrun.terminal import clean


@dataclass(frozen=True)
class Diff:
    """Compare two versions: which samples were added, dropped, relabelled, moved or changed."""

    examples: ClassVar[Examples] = (
        ("{prog} data/shards@1 data/shards@2", "two versions"),
        ("{prog} data/shards@1 data/shards", "a version and the newest one"),
    )

    before: Positional[str]
    """Shard folder or http(s):// URL, with or without a version."""
    after: Positional[str]
    """The same, of what it is compared with."""
    json: bool = False
    """Print JSON: added, dropped, relabelled, moved (to another split), changed (other bytes)."""
    workers: int = 0
    """Number of processes; 0: one per core."""

    def run(self) -> None:
        """Print a line per sample that differs, and how many there are."""
        before, after = open_source(self.before), open_source(self.after)
        difference = compared(before, after, self.workers or core_count())
        if self.json:
            sys.stdout.write(json.dumps(asdict(difference), indent=2) + "\n")
            return
        for line in difference.lines():
            sys.stdout.write(f"{clean(line)}\n")
        counts = ", ".join(f"{len(table):,} {what}" for what, table in vars(difference).items())
        sys.stdout.write(f"{counts}\n")


class _Sample(NamedTuple):
    split: str
    class_name: str
    mark: int  # its image's CRC-32 and length


_Samples = Mapping[str, Mapping[str, _Sample]]
"""Samples by key and split."""


@dataclass
class Difference:
    """Samples by key: the class, or what it was and what it is."""

    added: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    relabelled: dict[str, list[str]] = field(default_factory=dict)
    moved: dict[str, list[str]] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield a line per sample."""
        yield from (f"+ {key}  {name}" for key, name in self.added.items())
        yield from (f"- {key}  {name}" for key, name in self.dropped.items())
        for sign, table in (("=", self.relabelled), (">", self.moved)):
            yield from (f"{sign} {key}  {old} -> {new}" for key, (old, new) in table.items())
        yield from (f"~ {key}  {name}" for key, name in self.changed.items())


def compared(before: Source, after: Source, workers: int) -> Difference:
    """Return what differs; tars that both have, with the same classes, are not opened."""
    common = set(map(_content, shards_of(before))) & set(map(_content, shards_of(after)))
    old, new = (_samples(source, common, workers) for source in (before, after))
    difference = Difference()
    for key, was, now in _pairs(old, new):
        if was is None and now:
            difference.added[key] = now.class_name
        elif now is None and was:
            difference.dropped[key] = was.class_name
        elif was and now:
            if was.class_name != now.class_name:
                difference.relabelled[key] = [was.class_name, now.class_name]
            if was.split != now.split:
                difference.moved[key] = [was.split, now.split]
            if was.mark != now.mark:
                difference.changed[key] = now.class_name
    return difference


def _pairs(old: _Samples, new: _Samples) -> Iterator[tuple[str, _Sample | None, _Sample | None]]:
    """Yield each sample as it was and as it is, one of which may be None."""
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key, {}), new.get(key, {})
        if len(was) < 2 and len(now) < 2:
            yield key, next(iter(was.values()), None), next(iter(now.values()), None)
            continue
        # Another program has given the key to a sample of each of two splits.
        for split in sorted(was.keys() | now.keys()):
            yield f"{key} in {split}", was.get(split), now.get(split)


def _content(stored: StoredShard) -> tuple[str, str, tuple[str, ...]]:
    """Return split and digest of a shard, and the class of each of its samples.

    Two folders may index the same tars under other classes.
    """
    classes = stored.source.manifest.classes
    labels = stored.rows["label"].tolist()
    return stored.split, stored.shard.sha256, tuple(classes[label] for label in labels)


def _samples(
    source: Source, common: set[tuple[str, str, tuple[str, ...]]], workers: int
) -> _Samples:
    shards = [stored for stored in shards_of(source) if _content(stored) not in common]
    samples = defaultdict[str, dict[str, _Sample]](dict)
    for stored, keys in keys_of(shards, workers).items():
        labels, marks = stored.rows["label"].tolist(), image_marks(stored.rows).tolist()
        for key, label, mark in zip(keys, labels, marks, strict=True):
            class_name = source.manifest.classes[label]
            samples[key][stored.split] = _Sample(stored.split, class_name, mark)
    return samples
