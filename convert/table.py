"""Images that a table lists: a CSV or Parquet file with a path, a label and perhaps a split a row.

Paths are relative to the table's folder, or to --root, and must not lead out of it.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from glob import escape
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
from rackrun.convert.options import Packing
from rackrun.convert.packing.pack import pack
from rackrun.convert.readers.class_order import with_classes
from rackrun.convert.readers.csv_rows import csv_rows
from rackrun.convert.readers.directories import ListedFiles, MissingFile
from rackrun.convert.readers.names import (
    class_names,
    class_table,
    dataset_name,
    free_key,
)
from rackrun.convert.readers.records import (
    HELD_OUT,
    IMAGE_SUFFIXES,
    REENCODED_SUFFIXES,
    SPLITS,
    TRAIN,
    VAL,
    ImageDefect,
    Listed,
    Record,
    RecordListing,
    as_text,
)
from rackrun.errors import DataError, MissingPackage, UsageError
from rackrun.shards.class_names import MOST_CHARACTERS, is_class_name
from rackrun.terminal import clean, say
from rackrun.units import first_few, plural

NO_TEXT = (type(None), list, dict, bytes)  # cells of Parquet that are no path and no label
OF_MISSING = ("nan", "NaN", "None", "<NA>", "NULL", "null")  # what programs write for no value
NAMED = 5  # missing files that a message names
SEVERAL = re.compile(r"\s*[ ,;|/+&]\s*")  # between the labels of an image that has more than one
LIKE_SPLITS = {"is_valid", "is_val", "is_train", "is_test", "usage", "subset", "fold", "kfold"}
"""Columns by which other programs divide the rows."""
SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")
PACKED = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zip": "unzip"}


@dataclass(frozen=True)
class Columns:
    """The columns of the table."""

    root: Path | None = None
    """Folder that paths are relative to; default: that of the table."""
    path_column: str = "path"
    """Column with the paths of the images."""
    label_column: str = "label"
    """Column with their classes, as names or numbers."""
    split_column: str = "split"
    """Column with train, val or test; without it, a part of each class is held out."""
    group_column: str = ""
    """Column of groups, such as patients: rows with the same value stay in the same split."""


@dataclass(frozen=True)
class ImageTable:
    """A CSV or Parquet file of paths and labels."""

    examples: ClassVar[Examples] = (
        ("{prog} images.csv data/shards --root photos", "paths below photos/"),
    )

    source: Positional[Path]
    """CSV file with a header line, or Parquet file."""
    out: Positional[Path]
    """Folder for the shards; created if it is missing."""
    columns: Columns = field(default_factory=Columns)
    name: str = ""
    """Name of the data set in the names of the shards; default: that of the table."""
    classes: Path | None = None
    """File with one class per line, in the order of their numbers; other classes are left out.
    Default: all classes, sorted."""
    packing: Packing = field(default_factory=Packing)

    def run(self) -> None:
        """Convert it."""
        pack(with_classes(self.listing(), self.classes), self.packing, self.out)

    def listing(self) -> RecordListing:
        """List the images of the table."""
        _refuse_no_table(self.source)
        rows = _rows(self.source, self.columns)
        names = class_names({row.label for row in rows})
        if missing := [row.label for row in rows if row.label in OF_MISSING]:
            what = f"{plural(len(missing), 'row')} with the label {missing[0]}"
            say(clean(f"{self.source}: {what}, which is a class; if it means none, remove them"))
        kinds = {row.label for row in rows}
        parts = {kind: SEVERAL.split(kind) for kind in kinds}
        if combined := sorted(k for k in kinds if len(parts[k]) > 1 and kinds.issuperset(parts[k])):
            what = f"{plural(len(combined), 'label')} of several others: {first_few(combined, 3)}"
            say(clean(f"{self.source}: {what}; each is a class of its own: an image has one class"))
        rows = [row._replace(label=names[row.label]) for row in rows]
        classes = class_table({row.label for row in rows})
        container = TableImages(self.source, self.columns.root)
        groups = dict[str, str]()
        records = container.records(rows, classes, groups)
        return RecordListing(
            dataset_name(self.name or self.source.stem),
            tuple(classes),
            (container,),
            _complete(records, container, self.packing.allow_left_out or 0),
            group_of=(lambda record: groups[record.name]) if self.columns.group_column else None,
        )


class ListedImage(NamedTuple):
    """A line of the table."""

    number: int
    path: str
    label: str
    split: str
    group: str


class TableImages(ListedFiles):
    """The files of a table."""

    def __init__(self, table: Path, root: Path | None) -> None:
        super().__init__(root or table.parent)
        self.table, self.name = table, as_text(table.name)

    def records(
        self, rows: list[ListedImage], classes: dict[str, int], groups: dict[str, str]
    ) -> Iterator[Listed]:
        """Yield the images of the rows; their groups, by name, are added to `groups`."""
        train = TRAIN if any(row.split == VAL for row in rows) else HELD_OUT
        suffix, keys = self._lacking_suffix(rows), set[str]()
        for row in rows:
            where, path = clean(f"{self.table}: line {row.number}: {row.path}"), row.path + suffix
            if "\\" in path and not (self.root / path).exists():
                path = path.replace("\\", "/")  # as written on Windows
            try:
                name, size = self.find(path, where)
            except MissingFile:
                yield ImageDefect(row.path, "missing", f"line {row.number}")
                continue
            if name in groups:
                raise DataError(f"{where}: is in the table twice; leave one of them out")
            groups[name] = row.group
            stem = str(PurePosixPath(name).with_suffix("")).replace("/", "_")
            key = free_key((stem,), name, keys)
            split = train if row.split == TRAIN else row.split
            record = Record(key, classes[row.label], split, name, 0, 0, size, size)
            yield record if size else ImageDefect(name, "empty")

    def _lacking_suffix(self, rows: list[ListedImage]) -> str:
        """Return the suffix of the first row's file where no path has one; else nothing."""
        known = (*IMAGE_SUFFIXES, *REENCODED_SUFFIXES)
        first = self.root / rows[0].path
        if any(row.path.lower().endswith(known) for row in rows) or first.is_file():
            return ""
        beside = [path.suffix for path in first.parent.glob(f"{escape(first.name)}.*")]
        suffixes = [suffix for suffix in beside if suffix.lower() in known]
        if len(suffixes) != 1:
            return ""
        what = f"{suffixes[0]} is added, as that of {rows[0].path}"
        say(clean(f"{self.table}: no path has a suffix: {what}"))
        return suffixes[0]


def _complete(records: Iterator[Listed], container: TableImages, allowed: int) -> Iterator[Listed]:
    """Yield the images; DataError after them if more files are missing than allowed."""
    missing = list[ImageDefect]()
    for each in records:
        if isinstance(each, ImageDefect) and each.kind == "missing":
            missing.append(each)
        yield each
    if len(missing) > allowed:
        names = first_few([f"{each.detail}: {each.name}" for each in missing], NAMED)
        below = next(container.root.glob(f"*/{escape(missing[0].name)}*"), None)
        remedy = f"; type --root {below.parent}" if below else "; correct the table, or --root"
        raise DataError(
            clean(
                f"{container.table}: {plural(len(missing), 'file')} of it: there is no such file in"
                f" {container.root}: {names}{remedy}, or add --allow-left-out {len(missing)}"
            )
        )


def _refuse_no_table(path: Path) -> None:
    if path.suffix.lower() in (".jsonl", ".json"):
        raise UsageError(
            f"{path}: lines of JSON; type: {called('convert')} hf FOLDER OUT --label-column label "
            "--root FOLDER, with the folder that it is in"
        )
    if not path.exists():
        raise UsageError(f"{path}: there is no such file")
    if path.suffix.lower() in SPREADSHEETS:
        raise UsageError(f"{path}: a spreadsheet; save it as CSV UTF-8, and give that")
    if unpack := PACKED.get(path.suffix.lower()):
        raise UsageError(f"{path}: compressed; type: {unpack} {shlex.quote(str(path))}")


def _rows(table: Path, columns: Columns) -> list[ListedImage]:
    names = (columns.path_column, columns.label_column, columns.split_column)
    needed = (*names[:2], *filter(None, [columns.group_column]))
    is_parquet = table.suffix.lower() in (".parquet", ".pq")
    rows, of_splits = list[ListedImage](), set[str]()
    for number, fields in _of_parquet(table) if is_parquet else csv_rows(table):
        missing = [name for name in needed if name not in fields]
        if missing:
            has = clean(", ".join(map(str, fields)))[:200]
            if any(suffix in has.lower() for suffix in IMAGE_SUFFIXES):
                raise UsageError(
                    f"{table}: its first line names no columns, but is {has}; put a"
                    f" line before it: {','.join(names[:2])}"
                )
            raise UsageError(
                f"{table}: no column {missing[0]!r}, only {has}; name them by "
                f"--path-column, --label-column and --split-column{_of_one_hot(fields)}"
            )
        cells = (fields.get(name) for name in names)
        path, label, split = (
            "" if isinstance(cell, NO_TEXT) else str(cell).strip() for cell in cells
        )
        named = {name for name, cell in fields.items() if str(cell).strip().lower() in SPLITS}
        of_splits = named & of_splits if rows else named
        where = clean(f"{table}: line {number}")
        if not path or "\0" in path or not is_class_name(label):
            raise DataError(
                f"{where}: no path, or no label of at most {MOST_CHARACTERS} characters"
            )
        if split and split.lower() not in SPLITS:
            raise DataError(clean(f"{where}: split {split[:60]!r} is none of {', '.join(SPLITS)}"))
        group = str(fields[columns.group_column]) if columns.group_column else ""
        split = SPLITS.get(split.lower(), HELD_OUT)
        rows.append(ListedImage(number, path, label, split, group))
    if not rows:
        raise DataError(f"{table}: no rows in it")
    if columns.split_column not in fields:
        _say_unused_splits(table, of_splits, fields)
    if len({bool(row.split) for row in rows}) > 1:
        raise DataError(f"{table}: some rows have a split and some none; fill them in")
    return rows


def _of_one_hot(fields: Mapping[str, Any]) -> str:
    """Return what to do if the row has a column per class, of which one is 1, and the others 0."""
    flags = {name: str(cell).strip() for name, cell in fields.items()}
    kinds = [name for name, cell in flags.items() if cell in ("0", "1", "0.0", "1.0")]
    if len(kinds) < 2 or sum(float(flags[name]) for name in kinds) != 1:
        return ""
    return clean(
        f"; {first_few(kinds, 3)} look like a column per class: write the name of the one that is 1"
        " into a column 'label'"
    )


def _say_unused_splits(table: Path, of_splits: set[str], fields: Mapping[str, Any]) -> None:
    """Say which column holds splits, or is called as if it did, where none is used."""
    if of_splits:
        name = min(of_splits)
        say(clean(f"{table}: column {name!r} names splits; to use them: --split-column {name}"))
    elif names := [name for name in fields if name.strip().lower() in LIKE_SPLITS]:
        what = f"column {names[0]!r} is not used; if it divides the images, write train, val and"
        say(clean(f"{table}: {what} test into a column 'split'"))


def _of_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the cells of each row by column, after its number."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise MissingPackage("pyarrow", "parquet") from None
    try:
        with ParquetFile(path) as file:
            rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
            yield from enumerate(rows, 1)
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path}: cannot be read as Parquet: {error}") from None
