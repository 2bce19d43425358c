"""Fewer samples, or other classes: a version with other rows; no tar is written.

    names or table -> keys of the shards -> rows to drop or to give another class -> next version

What is to change is named on the command line, or by a table such as doctor.csv:

split,shard,key,class,problem,action,new_class,score,reason
train,cats-train-000003.tar,cat_17,cat,wrong label,relabel,dog,0.98,…

`drop` takes the rows whose action is drop, `relabel` those whose action is relabel; a table without
that column is taken whole. Of a row, shard and class must be right if they are filled in.
"""

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
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
DONE = {"drop": "dropped", "relabel": "relabeled"}


@dataclass(frozen=True)
class Drop:
    """Drop samples from a shard folder, as a new version; its tars stay unchanged."""

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
    """Change the class of samples in a shard folder, as a new version; its tars stay unchanged."""

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
        changes = _changes(newest, edits)
        if not changes:
            say(f"{folder}: nothing to {action}; the newest version is {newest.manifest.number}")
            return
        parts = []
        for part in newest.parts():
            here = {place.row: new for place, new in changes.items() if place.split == part.split}
            if action == "drop":
                part = part._replace(rows=np.delete(part.rows, [*here]))
            else:
                part.rows["label"][[*here]] = [*here.values()]
            parts.append(part)
        newest.publish(parts, {DONE[action]: len(changes)}, (action, data, *requests))
        say(f"{folder}: {plural(len(changes), 'sample')} {DONE[action]}")
        if others:
            say(f"{folder}: skipped {plural(others, 'row')} whose action is not {action}")


class Edit(NamedTuple):
    """A sample to change, and where the user asked for that."""

    key: str
    where: str
    """The place of the request, for messages."""
    shard: str = ""
    class_name: str = ""
    new_class: str = ""

    def refuse(self, why: str) -> DataError:
        """Return the error for this request."""
        places = dict.fromkeys((self.where, self.key))  # a typed key is its own place
        return DataError(clean(": ".join((*places, why))))


def _edits(requests: Sequence[str], action: str) -> tuple[list[Edit], int]:
    """Return what names and tables ask for, and how many rows ask for something else."""
    if not requests:
        raise UsageError(f"samples: missing; type: {called('convert')} {action} --help")
    asked = list[Edit | None]()
    for text in requests:
        if text.lower().endswith(TABLE):
            asked += _rows(Path(text), action)
        else:
            asked.append(_named(text, action))
    edits = [edit for edit in asked if edit]
    if not edits:
        raise UsageError(f"{first_few([*requests], NAMED)}: no row whose action is {action}")
    return edits, len(asked) - len(edits)


def _named(text: str, action: str) -> Edit:
    name, new_class = text, ""
    if action == "relabel":
        name, _, new_class = text.rpartition("=")
        if not name or not new_class:
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
        where = clean(f"{table}: line {line}")
        cells = {name: in_cell((value or "").strip()) for name, value in row.items() if name}
        if ACTION in row and cells[ACTION] != action:
            yield None
            continue
        if any(len(value) > MOST_CELL for value in cells.values()):
            raise DataError(f"{where}: a cell of more than {MOST_CELL:,} characters")
        new_class = cells[NEW_CLASS] if action == "relabel" else ""
        if not cells[KEY] or (action == "relabel" and not new_class):
            key = clean(cells[KEY])
            raise DataError(f"{where}: {key}: no new_class" if key else f"{where}: no key")
        yield Edit(cells[KEY], where, cells.get(SHARD, ""), cells.get(CLASS, ""), new_class)


class Place(NamedTuple):
    """Where a sample of the newest version is, and its class."""

    split: str
    shard: str
    row: int
    """Within its split."""
    label: int


def _changes(newest: NewestVersion, edits: Sequence[Edit]) -> dict[Place, int | None]:
    """Return the new label of each sample, None for one to drop; without what is so already.

    DataError, with file and line, for a key or a class that no version has. Rows that were written
    for another state of their sample are skipped, and the first one is named.
    """
    classes, places = newest.manifest.classes, _places(newest, {edit.key for edit in edits})
    _refuse_absent([edit for edit in edits if edit.key not in places], newest)
    shards = {stored.shard.name for stored in shards_of(newest.source)}
    wanted: dict[Place, int | None] = {}
    stale = list[DataError]()
    for edit in edits:
        if edit.key not in places:
            continue
        meant = [each for each in places[edit.key] if each.shard == edit.shard]
        place, *more = meant or places[edit.key]
        if more:
            names = " and ".join(f"{each.shard}/{edit.key}" for each in (place, *more))
            raise edit.refuse(f"two samples have that key; type one of {names}")
        new = _class_number(edit, classes) if edit.new_class else None
        why = ""
        if edit.shard in shards and edit.shard != place.shard:
            why = f"it is in {place.shard}, not in {edit.shard}"
        elif edit.class_name and edit.class_name != classes[place.label]:
            why = f"its class is {classes[place.label]}, not {edit.class_name}"
        if why and new != place.label:  # else the row has been carried out before
            stale.append(edit.refuse(why))
        elif wanted.setdefault(place, new) != new:
            raise edit.refuse("two classes are asked for; leave one of them")
    if stale:
        say(f"skipped {plural(len(stale), 'row')} for another state of DATA; {stale[0]}")
    return {place: new for place, new in wanted.items() if new != place.label}


def _places(newest: NewestVersion, keys: set[str]) -> dict[str, list[Place]]:
    """Return the samples of these keys, which two splits of other programs may share."""
    places, rows = defaultdict[str, list[Place]](list), Counter[str]()
    for stored in shards_of(newest.source):
        labels = stored.rows["label"].tolist()
        for key, label in zip(stored.sample_keys(), labels, strict=True):
            if key in keys:
                row = rows[stored.split]
                places[key].append(Place(stored.split, stored.shard.name, row, label))
            rows[stored.split] += 1
    return places


def _class_number(edit: Edit, classes: Sequence[str]) -> int:
    if edit.new_class in classes:
        return classes.index(edit.new_class)
    near = difflib.get_close_matches(edit.new_class, classes, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {first_few([*classes], NAMED)}"
    raise edit.refuse(f"no class {edit.new_class!r}; {hint}; append adds new classes")


def _refuse_absent(edits: Sequence[Edit], newest: NewestVersion) -> None:
    """Raise DataError for a sample that is not there, unless it has been dropped already."""
    if not edits:
        return
    dropped = {key for stored in newest.earlier_shards() for key in stored.sample_keys()}
    keys = (key for stored in shards_of(newest.source) for key in stored.sample_keys())
    example = next(keys, "")
    hint = f"; keys look like {example}" if example else ""
    for edit in edits:
        if edit.key not in dropped:
            raise edit.refuse(f"no sample has that key (version {newest.manifest.number}){hint}")
    say(f"{newest.target.folder}: {plural(len(edits), 'sample')} dropped already")
