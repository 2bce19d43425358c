"""Fewer samples, or other classes: the shards that hold them are written anew, under new names.

    names or table -> keys of the shards -> plan of what stays -> shards -> next version

The old shards stay as they are, for the versions that have them. What is to change is named on the
command line, or by a table such as doctor.csv:

split,shard,key,class,problem,action,new_class,score,reason
train,cats-train-000003.tar,cat_17,cat,wrong label,relabel,dog,0.98,…

`drop` takes the rows whose action is drop, `relabel` those whose action is relabel; a table without
that column is taken whole. Of a row, shard and class must be right if they are filled in.
"""

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

from rackrun.commandline.options import Examples, Hidden, Positional
from rackrun.commands import called
from rackrun.convert.options import Packing
from rackrun.convert.packing.pack import write_shards, write_version
from rackrun.convert.packing.plan import make_plan
from rackrun.convert.packing.stored_samples import ShardKeys, StoredSamples, keys_of
from rackrun.convert.readers.csv_rows import csv_rows
from rackrun.convert.readers.records import RecordListing
from rackrun.convert.readers.webdataset_tars import LABEL_FIELD
from rackrun.convert.versions.parent import Parent
from rackrun.errors import DataError, UsageError
from rackrun.tables import in_cell
from rackrun.terminal import clean, say
from rackrun.units import first_few, plural

TABLE = ".csv"
KEY, SHARD, CLASS, ACTION, NEW_CLASS = "key", "shard", "class", "action", "new_class"
MOST_CELL = 1000  # characters
NAMED = 5
DONE = {"drop": "dropped", "relabel": "relabelled"}


@dataclass(frozen=True)
class _Change:
    """What both commands take."""

    action: ClassVar[str]

    data: Positional[str]
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
    data: str, requests: Sequence[str], action: str, packing: Packing, label_field: str
) -> None:
    edits, others = _edits(requests, action)
    with Parent.locked(data) as parent:
        manifest, folder = parent.manifest, parent.target.folder
        samples = StoredSamples(parent.source, label_field)
        keys = parent.keys(packing.processes)
        labels = _labels(parent, edits, keys, packing.processes)
        if not labels:
            say(f"{folder}: nothing to {action}; the newest version is {manifest.number}")
            return
        shards = {name.partition("/")[0] for name in labels}
        touched = {stored: keys[stored] for stored in keys if stored.shard.name in shards}
        records = list(samples.records(touched, labels))
        for record in records:
            if record.name in labels:
                samples.labelled(record)  # or an error, before anything is written
        listing = RecordListing(
            manifest.dataset, manifest.classes, (samples,), iter(records), copied=True
        )
        packing = replace(packing, seed=manifest.seed, val_percent=0.0, preset=parent.preset)
        packing = replace(packing, allow=("similar-classes",))
        replaced = Counter(stored.split for stored in touched)
        plan, lines = make_plan(listing, packing, parent.starts(replaced))
        plan = replace(
            parent.planned(plan),
            origins=manifest.sources,
            replaced=tuple(sorted(shards)),
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


@dataclass(frozen=True)
class Edit:
    """A sample to change, and where that was asked for."""

    key: str
    where: str
    """The place of the request, for messages."""
    shard: str = ""
    class_name: str = ""
    new_class: str = ""

    def refuse(self, why: str) -> DataError:
        """Return the error for this request."""
        return DataError(clean(f"{self.where}: {self.key}: {why}"))


def _edits(requests: Sequence[str], action: str) -> tuple[list[Edit], int]:
    """Return what names and tables ask for, and how many rows ask for something else."""
    if not requests:
        raise UsageError(f"samples: missing; type: {called('convert')} {action} --help")
    edits, others = list[Edit](), 0
    for text in requests:
        if not text.lower().endswith(TABLE):
            edits.append(_named(text, action))
            continue
        for edit in _rows(Path(text), action):
            if edit is None:
                others += 1
            else:
                edits.append(edit)
    if not edits:
        raise UsageError(f"{first_few([*requests], NAMED)}: no row whose action is {action}")
    return edits, others


def _named(text: str, action: str) -> Edit:
    name, new_class = text, ""
    if action == "relabel":
        name, equals, new_class = text.rpartition("=")
        if not equals or not new_class:
            raise UsageError(f"{text}: no class; type KEY=CLASS, or a table that ends with {TABLE}")
    shard, tar, key = name.partition(".tar/")
    if not tar:
        return Edit(name, name, new_class=new_class)
    return Edit(key, name, f"{shard}.tar", new_class=new_class)


def _rows(table: Path, action: str) -> Iterator[Edit | None]:
    """Yield the rows of a table; None for one with another action."""
    needed = (KEY, NEW_CLASS) if action == "relabel" else (KEY,)
    for line, row in csv_rows(table):
        if missing := [name for name in needed if name not in row]:
            has = clean(", ".join(row))[:200]
            raise UsageError(f"{table}: no column {missing[0]!r}, only {has}")
        yield _edit(row, action, clean(f"{table}: line {line}"))


def _edit(row: dict[str, str | None], action: str, where: str) -> Edit | None:
    cells = {name: in_cell((value or "").strip()) for name, value in row.items() if name}
    if ACTION in row and cells[ACTION] != action:
        return None
    if any(len(value) > MOST_CELL for value in cells.values()):
        raise DataError(f"{where}: a cell of more than {MOST_CELL:,} characters")
    if not cells[KEY]:
        raise DataError(f"{where}: no key")
    new_class = cells.get(NEW_CLASS, "") if action == "relabel" else ""
    if action == "relabel" and not new_class:
        raise DataError(f"{where}: {clean(cells[KEY])}: no new_class")
    return Edit(cells[KEY], where, cells.get(SHARD, ""), cells.get(CLASS, ""), new_class)


class _Current(NamedTuple):
    """A sample of the newest version."""

    shard: str
    label: int


def _labels(
    parent: Parent, edits: Sequence[Edit], keys: ShardKeys, workers: int
) -> dict[str, int | None]:
    """Return the new label by SHARD/KEY, None for a sample to drop; without what is so already.

    DataError, with file and line, for a key or a class that no version has. Rows that were written
    for another state of their sample are left aside, and the first one is named.
    """
    classes, current = parent.manifest.classes, _current(edits, keys)
    _check_absent([edit for edit in edits if edit.key not in current], parent, workers)
    shards = {stored.shard.name for stored in keys}
    labels: dict[str, int | None] = {}
    stale = list[DataError]()
    for edit in edits:
        if edit.key not in current:
            continue
        samples = current[edit.key]
        meant = [each for each in samples if each.shard == edit.shard] or samples
        if len(meant) > 1:
            names = " and ".join(f"{each.shard}/{edit.key}" for each in meant)
            raise edit.refuse(f"two samples have that key; type one of {names}")
        sample, class_name = meant[0], classes[meant[0].label]
        new = _class_number(edit, classes) if edit.new_class else None
        why = ""
        if edit.shard in shards and edit.shard != sample.shard:
            why = f"it is in {sample.shard}, not in {edit.shard}"
        elif edit.class_name and edit.class_name != class_name:
            why = f"its class is {class_name}, not {edit.class_name}"
        if why and new != sample.label:  # else the row has been carried out before
            stale.append(edit.refuse(why))
        elif labels.setdefault(f"{sample.shard}/{edit.key}", new) != new:
            raise edit.refuse("two classes are asked for; leave one of them")
    if stale:
        say(f"left aside {plural(len(stale), 'row')} for another state of DATA; {stale[0]}")
    before = {f"{each.shard}/{key}": each.label for key in current for each in current[key]}
    return {name: new for name, new in labels.items() if new != before[name]}


def _current(edits: Sequence[Edit], keys: ShardKeys) -> dict[str, list[_Current]]:
    """Return the samples that edits name, by key, which two splits of other programs may share."""
    asked = {edit.key for edit in edits}
    current = defaultdict[str, list[_Current]](list)
    for stored, shard_keys in keys.items():
        if asked.isdisjoint(shard_keys):
            continue
        for key, label in zip(shard_keys, stored.rows["label"].tolist(), strict=True):
            if key in asked:
                current[key].append(_Current(stored.shard.name, label))
    return current


def _class_number(edit: Edit, classes: Sequence[str]) -> int:
    if edit.new_class in classes:
        return classes.index(edit.new_class)
    near = difflib.get_close_matches(edit.new_class, classes, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {first_few([*classes], NAMED)}"
    raise edit.refuse(f"no class {edit.new_class!r}; {hint}; a new class comes with append")


def _check_absent(edits: Sequence[Edit], parent: Parent, workers: int) -> None:
    """Raise DataError for a sample that is not there, unless it has been dropped already."""
    if not edits:
        return
    earlier = [stored for stored, is_newest in parent.stored() if not is_newest]
    dropped = {key for keys in keys_of(earlier, workers).values() for key in keys}
    for edit in edits:
        if edit.key not in dropped:
            raise edit.refuse(f"no sample has that key (version {parent.manifest.number})")
    say(f"{parent.target.folder}: {plural(len(edits), 'sample')} dropped already")
