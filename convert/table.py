"""Images that a table lists: a CSV or Parquet file with a path, a label and perhaps a split a row.

Paths are relative to the table's folder, or to --root, and must not lead out of it.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

from rackrun.commandline.options import Examples, Positional
from rackrun.convert.options import Packing
from rackrun.convert.packing.pack import pack
from rackrun.convert.packing.plan import SPLITS, TRAIN, VAL
from rackrun.convert.readers.directories import ListedFiles
from rackrun.convert.readers.names import (
    MAX_NAME,
    class_names,
    class_table,
    dataset_name,
    free_key,
    is_class_name,
)
from rackrun.convert.readers.records import (
    HELD_OUT,
    ImageDefect,
    Record,
    RecordListing,
    as_text,
    images,
)
from rackrun.errors import DataError, MissingPackage, UsageError
from rackrun.shards.index import Origin
from rackrun.terminal import clean


@dataclass(frozen=True)
class Columns:
    """Of a table."""

    root: Path | None = None
    """Folder that paths are relative to; by default the table's."""
    path_column: str = "path"
    """Column with the images' paths."""
    label_column: str = "label"
    """Column with their classes, names or numbers."""
    split_column: str = "split"
    """Column with train, val or test; without it a part of each class is held out."""


@dataclass(frozen=True)
class ImageTable:
    """A CSV or Parquet file of paths and labels."""

    examples: ClassVar[Examples] = (
        ("{prog} images.csv data/shards --root photos", "paths below photos/"),
    )

    source: Positional[Path]
    """CSV file with a header line, or Parquet file."""
    out: Positional[Path]
    """Folder for the shards; made if it is missing."""
    columns: Columns = field(default_factory=Columns)
    name: str = ""
    """Name of the data set in the shards' names; by default the table's."""
    packing: Packing = field(default_factory=Packing)

    def run(self) -> None:
        """Convert it."""
        pack(self.listing(), self.packing, self.out)

    def listing(self) -> RecordListing:
        """List the images of the table."""
        rows = _rows(self.source, self.columns)
        names = class_names({row.label for row in rows})
        rows = [row._replace(label=names[row.label]) for row in rows]
        classes = class_table({row.label for row in rows})
        container = TableImages(self.source, self.columns.root)
        findings = list[ImageDefect]()
        records = images(_records(self.source, rows, classes, container), findings)
        dataset = dataset_name(self.name or self.source.stem)
        return RecordListing(dataset, tuple(classes), (container,), records, findings)


class ListedImage(NamedTuple):
    """A line of the table."""

    number: int
    path: str
    label: str
    split: str


class TableImages(ListedFiles):
    """The files of a table."""

    def __init__(self, table: Path, root: Path | None) -> None:
        super().__init__(root or table.parent)
        self._table = table

    def origin(self) -> Origin:
        """Return the table's entry of the manifest: the bytes are those of its images."""
        digest = sha256(self._table.read_bytes()).hexdigest()
        return Origin(as_text(self._table.name), self.bytes, digest)


def _records(
    table: Path, rows: list[ListedImage], classes: dict[str, int], container: TableImages
) -> Iterator[Record]:
    train = TRAIN if any(row.split == VAL for row in rows) else HELD_OUT
    names, keys = set[str](), set[str]()
    for row in rows:
        where = clean(f"{table}: line {row.number}: {row.path}")
        name, size = container.find(row.path, where)
        if name in names:
            raise DataError(f"{where}: is in the table twice; leave one of them out")
        names.add(name)
        stem = str(PurePosixPath(name).with_suffix("")).replace("/", "_")
        key = free_key((stem,), name, keys)
        split = train if row.split == TRAIN else row.split
        yield Record(key, classes[row.label], split, name, 0, 0, size, size)


def _rows(table: Path, columns: Columns) -> list[ListedImage]:
    names = (columns.path_column, columns.label_column, columns.split_column)
    is_parquet = table.suffix.lower() in (".parquet", ".pq")
    table_rows = _of_parquet(table) if is_parquet else _of_csv(table)
    rows = []
    for number, fields in enumerate(table_rows, start=1 if is_parquet else 2):
        missing = [name for name in names[:2] if name not in fields]
        if missing:
            has = clean(", ".join(map(str, fields)))[:200]
            raise UsageError(
                f"{table}: no column {missing[0]!r}, only {has}; name them by "
                "--path-column, --label-column and --split-column"
            )
        cells = (fields.get(name) for name in names)
        path, label, split = ("" if cell is None else str(cell).strip() for cell in cells)
        where = clean(f"{table}: line {number}")
        if not path or "\0" in path or not is_class_name(label):
            raise DataError(f"{where}: no path, or no label of at most {MAX_NAME} letters")
        if split and split.lower() not in SPLITS:
            raise DataError(clean(f"{where}: split {split[:60]!r} is none of {', '.join(SPLITS)}"))
        rows.append(ListedImage(number, path, label, SPLITS.get(split.lower(), HELD_OUT)))
    if not rows:
        raise DataError(f"{table}: no rows in it")
    if len({bool(row.split) for row in rows}) > 1:
        raise DataError(f"{table}: some rows have a split and some none; fill them in")
    return rows


def _of_csv(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from csv.DictReader(file, restkey="")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read as CSV: {error}") from None


def _of_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise MissingPackage("pyarrow", "parquet") from None
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path}: cannot be read as Parquet: {error}") from None


if __name__ == "__main__":
    from rackrun.convert.__main__ import run_script

    run_script("csv")
