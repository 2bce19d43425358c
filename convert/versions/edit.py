"""Fewer samples, or other classes: a version with other rows; no tar is written.

    names or table -> keys of the shards -> rows to drop or to give another class -> next version

What is to change is named on the command line, or by a table such as doctor.csv:

split,shard,key,class,problem,action,new_class,score,reason
train,cats-train-000003.tar,cat_17,cat,wrong label,relabel,dog,0.98,…

`drop` takes the rows whose action is drop, `relabel` those whose action is relabel; a table without
that column is taken whole. Of a row, shard and class must be right if they are filled in.
"""

import difflib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
from rackrun.convert.packing.copies import SplitRows
from rackrun.convert.packing.stored_samples import shards_of
from rackrun.convert.readers.csv_rows import csv_rows
from rackrun.convert.versions.version import NewestVersion
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
class Drop:
    """Take samples out of a shard folder, as its next version; its tars stay as they are."""

    examples: ClassVar[Examples] = (
        ("{prog} data/shards doctor.csv", "the rows of a table whose action is drop"),
        ("{prog} data/shards cat_17 cat_18", "samples by their keys"),
    )

    data: Positional[str]
    """Finished shard folder."""
    samples: Positional[tuple[str, ...]]
    """Keys, SHARD.tar/KEY, or CSV files with a column key."""

    def run(self) -> None:
        """Make the next version."""
        _edited(self.data, self.samples, "drop")


@dataclass(frozen=True)
class Relabel:
    """Give samples of a shard folder another class, as its next version; its tars stay."""

    examples: ClassVar[Examples] = (
        ("{prog} data/shards doctor.csv", "the rows of a table whose action is relabel"),
        ("{prog} data/shards cat_17=dog", "a sample by its key"),
    )

    data: Positional[str]
    """Finished shard folder."""
    samples: Positional[tuple[str, ...]]
    """KEY=CLASS, SHARD.tar/KEY=CLASS, or CSV files with the columns key and new_class."""

    def run(self) -> None:
        """Make the next version."""
        _edited(self.data, self.samples, "relabel")


def _edited(data: str, requests: Sequence[str], action: str) -> None:
    edits, others = _edits(requests, action)
    with NewestVersion.locked(data) as newest:
        folder = newest.target.folder
        labels = _labels(newest, edits)
        if not labels:
            say(f"{folder}: nothing to {action}; the newest version is {newest.manifest.number}")
            return
        parts = newest.parts()
        for split, by_row in labels.items():
            parts[split] = _changed(parts[split], by_row)
        count = sum(map(len, labels.values()))
        command = (action, data, *requests)
        newest.publish([*parts.values()], {DONE[action]: count}, command)
        say(f"{folder}: {plural(count, 'sample')} {DONE[action]}")
        if others:
            say(f"{folder}: left aside {plural(others, 'row')} whose action is not {action}")


def _changed(part: SplitRows, labels: dict[int, int | None]) -> SplitRows:
    rows, stays = part.rows, np.ones(len(part.rows), bool)
    for row, label in labels.items():
        if label is None:
            stays[row] = False
        else:
            rows["label"][row] = label
    return part._replace(rows=rows[stays])


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

    split: str
    shard: str
    row: int
    label: int


def _labels(newest: NewestVersion, edits: Sequence[Edit]) -> dict[str, dict[int, int | None]]:
    """Return the new label by split and row, None for a sample to drop; without what is so already.

    DataError, with file and line, for a key or a class that no version has. Rows that were written
    for another state of their sample are left aside, and the first one is named.
    """
    classes, current = newest.manifest.classes, _current(newest, edits)
    _check_absent([edit for edit in edits if edit.key not in current], newest)
    shards = {stored.shard.name for stored in shards_of(newest.source)}
    wanted: dict[_Current, int | None] = {}
    stale = list[DataError]()
    for edit in edits:
        if edit.key not in current:
            continue
        samples = current[edit.key]
        meant = [each for each in samples if each.shard == edit.shard] or samples
        if len(meant) > 1:
            names = " and ".join(f"{each.shard}/{edit.key}" for each in meant)
            raise edit.refuse(f"two samples have that key; type one of {names}")
        sample = meant[0]
        new = _class_number(edit, classes) if edit.new_class else None
        why = _other_state(edit, sample, classes[sample.label], shards)
        if why and new != sample.label:  # else the row has been carried out before
            stale.append(edit.refuse(why))
        elif wanted.setdefault(sample, new) != new:
            raise edit.refuse("two classes are asked for; leave one of them")
    if stale:
        say(f"left aside {plural(len(stale), 'row')} for another state of DATA; {stale[0]}")
    labels = defaultdict[str, dict[int, int | None]](dict)
    for sample, new in wanted.items():
        if new != sample.label:
            labels[sample.split][sample.row] = new
    return labels


def _other_state(edit: Edit, sample: _Current, class_name: str, shards: set[str]) -> str:
    """Return how a sample differs from what a request says of it; empty if it does not."""
    if edit.shard in shards and edit.shard != sample.shard:
        return f"it is in {sample.shard}, not in {edit.shard}"
    if edit.class_name and edit.class_name != class_name:
        return f"its class is {class_name}, not {edit.class_name}"
    return ""


def _current(newest: NewestVersion, edits: Sequence[Edit]) -> dict[str, list[_Current]]:
    """Return the samples that edits name, by key, which two splits of other programs may share."""
    asked = {edit.key for edit in edits}
    current, first = defaultdict[str, list[_Current]](list), defaultdict[str, int](int)
    for stored in shards_of(newest.source):
        begin, labels = first[stored.split], stored.rows["label"].tolist()
        first[stored.split] += len(labels)
        for row, (key, label) in enumerate(zip(stored.sample_keys(), labels, strict=True), begin):
            if key in asked:
                current[key].append(_Current(stored.split, stored.shard.name, row, label))
    return current


def _class_number(edit: Edit, classes: Sequence[str]) -> int:
    if edit.new_class in classes:
        return classes.index(edit.new_class)
    near = difflib.get_close_matches(edit.new_class, classes, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {first_few([*classes], NAMED)}"
    raise edit.refuse(f"no class {edit.new_class!r}; {hint}; a new class comes with append")


def _check_absent(edits: Sequence[Edit], newest: NewestVersion) -> None:
    """Raise DataError for a sample that is not there, unless it has been dropped already."""
    if not edits:
        return
    dropped = {key for stored in newest.earlier_shards() for key in stored.sample_keys()}
    for edit in edits:
        if edit.key not in dropped:
            raise edit.refuse(f"no sample has that key (version {newest.manifest.number})")
    say(f"{newest.target.folder}: {plural(len(edits), 'sample')} dropped already")
