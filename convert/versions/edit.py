"""Fewer samples, or other classes: the shards that hold them are written anew, under new names.

    names or table -> keys of the shards -> plan of what stays -> shards -> next version

The old shards stay as they are, for the versions that have them.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

from convert.options import Packing
from convert.packing.pack import write_shards, write_version
from convert.packing.plan import make_plan
from convert.packing.stored_samples import ShardKeys, StoredSamples, keys_of, rows_of
from convert.readers.records import RecordListing
from convert.readers.webdataset_tars import LABEL_FIELD
from convert.versions.edits import Edit, class_named, edits_of
from convert.versions.parent import Parent
from rackrun.commandline.options import Examples, Hidden, Positional
from rackrun.errors import DataError, UsageError
from rackrun.terminal import say
from rackrun.units import plural

Keys = Mapping[str, ShardKeys]
"""The keys of shards by the shard's name."""

DONE = {"drop": "dropped", "relabel": "relabelled"}


@dataclass(frozen=True)
class _Change:
    """What both commands take."""

    action: ClassVar[str]

    data: Positional[Path]
    """Finished shard folder."""
    samples: Positional[tuple[str, ...]]
    workers: int = 0
    """Number of processes; 0: one per core."""
    label_field: Annotated[str, Hidden] = LABEL_FIELD
    force: bool = False
    """Give up another change of DATA that was interrupted."""

    def run(self) -> None:
        """Make the next version; what is interrupted goes on with the same command."""
        packing = Packing(workers=self.workers, force=self.force)
        _edited(self.data, self.samples, self.action, packing, self.label_field)


@dataclass(frozen=True)
class Drop(_Change):
    """Take samples out of a shard folder, as its next version; its tars stay as they are."""

    action = "drop"
    examples: ClassVar[Examples] = (
        ("{prog} data/shards doctor.csv", "the rows of a table whose action is drop"),
        ("{prog} data/shards cat_17 cat_18", "samples by their keys"),
    )

    samples: Positional[tuple[str, ...]]
    """Keys, SHARD.tar/KEY, or CSV files with a column key."""


@dataclass(frozen=True)
class Relabel(_Change):
    """Give samples of a shard folder another class, as its next version; its tars stay."""

    action = "relabel"
    examples: ClassVar[Examples] = (
        ("{prog} data/shards doctor.csv", "the rows of a table whose action is relabel"),
        ("{prog} data/shards cat_17=dog", "a sample by its key"),
    )

    samples: Positional[tuple[str, ...]]
    """KEY=CLASS, SHARD.tar/KEY=CLASS, or CSV files with the columns key and new_class."""
    label_field: str = LABEL_FIELD
    """In tars of other programs: field of .json members that holds the class."""


def _edited(
    data: Path, given: Sequence[str], action: str, packing: Packing, label_field: str
) -> None:
    edits, others = edits_of(given, action)
    with Parent.locked(data) as parent:
        manifest, folder = parent.manifest, parent.target.folder
        samples = StoredSamples(parent.source, label_field)
        keys = parent.keys(packing.processes)
        labels = _labels(parent, edits, keys, packing.processes)
        if not labels:
            say(f"{folder}: nothing to {action}; the newest version is {manifest.number}")
            return
        shards = {name.partition("/")[0] for name in labels}
        touched = {name: keys[name] for name in keys if name in shards}
        records = list(samples.records(touched, labels))
        for record in records:
            if record.name in labels:
                samples.labelled(record)  # or an error, before anything is written
        listing = RecordListing(
            manifest.dataset, manifest.classes, (samples,), iter(records), copied=True
        )
        packing = replace(packing, seed=manifest.seed, val_percent=0.0, preset=parent.preset)
        packing = replace(packing, tiles=manifest.tiles, allow=("similar-classes",))
        replaced = Counter(stored.split for stored, _ in touched.values())
        plan, lines = make_plan(listing, packing, parent.starts(replaced))
        plan = replace(
            parent.planned(plan),
            origins=manifest.sources,
            replaced=tuple(sorted(touched)),
            change={DONE[action]: len(labels)},
        )
        if not plan.shards and len(touched) == len(keys):
            raise UsageError(f"{data}: no sample would be left; remove the folder instead")
        write = partial(write_shards, parent.target, plan, (samples,), packing)
        write_version(parent.target, plan, lines, packing, parent.source, write)
        done = f"{plural(len(labels), 'sample')} {DONE[action]}"
        say(f"{folder}: version {plan.version} is the newest one: {done}")
        if others:
            say(f"{folder}: left aside {plural(others, 'row')} whose action is not {action}")


class _Current(NamedTuple):
    """A sample of the newest version."""

    shard: str
    label: int


def _labels(
    parent: Parent, edits: Sequence[Edit], keys: Keys, workers: int
) -> dict[str, int | None]:
    """Return the new label by SHARD/KEY, None for a sample to drop; without what is so already.

    DataError, with file and line, for a key or a class that no version has. Rows that were written
    for another state of their sample are left aside, and the first one is named.
    """
    classes, current = parent.manifest.classes, _current(parent, edits, keys)
    labels: dict[str, int | None] = {}
    stale = list[DataError]()
    _check_absent([edit for edit in edits if edit.key not in current], parent, workers)
    for edit in edits:
        if edit.key not in current:
            continue
        sample = _sample_of(edit, current[edit.key])
        new = class_named(edit, classes) if edit.new_class else None
        if new != sample.label and (why := _misfit(edit, sample, keys, classes)):
            stale.append(edit.refuse(why))
        elif labels.setdefault(f"{sample.shard}/{edit.key}", new) != new:
            raise edit.refuse("two classes are asked for; leave one of them")
    if stale:
        say(f"left aside {plural(len(stale), 'row')} for another state of DATA; {stale[0]}")
    before = {f"{each.shard}/{key}": each.label for key in current for each in current[key]}
    return {name: new for name, new in labels.items() if new != before[name]}


def _current(parent: Parent, edits: Sequence[Edit], keys: Keys) -> dict[str, list[_Current]]:
    """Return the samples that edits name, by key, which two splits of other programs may share."""
    asked = {edit.key for edit in edits}
    current = defaultdict[str, list[_Current]](list)
    for name, (stored, shard_keys) in keys.items():
        if asked.isdisjoint(shard_keys):
            continue
        labels = rows_of(parent.source, stored)["label"].tolist()
        for key, label in zip(shard_keys, labels, strict=True):
            if key in asked:
                current[key].append(_Current(name, label))
    return current


def _sample_of(edit: Edit, samples: Sequence[_Current]) -> _Current:
    """Return the sample that an edit means; DataError if it may be one of two."""
    meant = [each for each in samples if each.shard == edit.shard] or samples
    if len(meant) > 1:
        names = " and ".join(f"{each.shard}/{edit.key}" for each in meant)
        raise edit.refuse(f"two samples have that key; type one of {names}")
    return meant[0]


def _misfit(edit: Edit, sample: _Current, keys: Keys, classes: Sequence[str]) -> str:
    """Return why an edit was written for another state of its sample; empty if it was not."""
    if edit.shard in keys and edit.shard != sample.shard:
        return f"it is in {sample.shard}, not in {edit.shard}"
    class_name = classes[sample.label]
    if edit.class_name and edit.class_name != class_name:
        return f"its class is {class_name}, not {edit.class_name}"
    return ""


def _check_absent(edits: Sequence[Edit], parent: Parent, workers: int) -> None:
    """Raise DataError for a sample that is not there, unless it has been dropped already."""
    if not edits:
        return
    earlier = [(source, stored) for source, stored, is_newest in parent.stored() if not is_newest]
    dropped = {key for _, keys in keys_of(earlier, workers).values() for key in keys}
    for edit in edits:
        if edit.key not in dropped:
            raise edit.refuse(f"no sample has that key (version {parent.manifest.number})")
    say(f"{parent.target.folder}: {plural(len(edits), 'sample')} dropped already")
