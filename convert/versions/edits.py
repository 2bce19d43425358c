"""What is to change in a shard folder: names on the command line, or a table such as doctor.csv.

split,shard,key,class,problem,action,new_class,score,reason
train,cats-train-000003.tar,cat_17,cat,wrong label,relabel,dog,0.98,…

`drop` takes the rows whose action is drop, `relabel` those whose action is relabel; a table without
that column is taken whole. Of a row, shard and class must be right if they are filled in.
"""

import csv
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rackrun.errors import DataError, UsageError
from rackrun.tables import in_cell
from rackrun.terminal import clean
from rackrun.units import first_few

TABLE = ".csv"
KEY, SHARD, CLASS, ACTION, NEW_CLASS = "key", "shard", "class", "action", "new_class"
MOST_CELL = 1000  # characters
NAMED = 5


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


def edits_of(given: Sequence[str], action: str) -> tuple[list[Edit], int]:
    """Return what names and tables ask for, and how many rows ask for something else.

    UsageError for a table that cannot be read, or without rows for this action.
    """
    edits, others = list[Edit](), 0
    for text in given:
        if not text.lower().endswith(TABLE):
            edits.append(_named(text, action))
            continue
        for edit in _rows(Path(text), action):
            if edit is None:
                others += 1
            else:
                edits.append(edit)
    if not edits:
        raise UsageError(f"{first_few([*given], NAMED)}: no row whose action is {action}")
    return edits, others


def _named(text: str, action: str) -> Edit:
    """Return the request in a name: KEY or SHARD/KEY, with =CLASS for relabel."""
    name, new_class = text, ""
    if action == "relabel":
        name, equals, new_class = text.rpartition("=")
        if not equals or not new_class:
            raise UsageError(f"{text}: no class; type KEY=CLASS, or a table that ends with {TABLE}")
    shard, tar, key = name.partition(".tar/")
    return (
        Edit(key, name, shard + ".tar", "", new_class)
        if tar
        else Edit(name, name, "", "", new_class)
    )


def _rows(table: Path, action: str) -> Iterator[Edit | None]:
    """Yield the rows of a table; None for one with another action."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="", strict=True)
            columns = set(reader.fieldnames or ())
            needed = (KEY, NEW_CLASS) if action == "relabel" else (KEY,)
            if missing := [name for name in needed if name not in columns]:
                has = clean(", ".join(map(str, columns)))[:200]
                raise UsageError(
                    f"{table}: no column {missing[0]!r}, only {has or 'an empty file'}"
                )
            for row in reader:
                yield _edit(row, action, clean(f"{table}: line {reader.line_num}"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{table}: cannot be read as CSV: {error}") from None


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


def class_named(edit: Edit, classes: Sequence[str]) -> int:
    """Return the number of the class that an edit names; DataError if there is none."""
    if edit.new_class in classes:
        return classes.index(edit.new_class)
    near = difflib.get_close_matches(edit.new_class, classes, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {first_few([*classes], NAMED)}"
    raise edit.refuse(f"no class {edit.new_class!r}; {hint}; a new class comes with append")
