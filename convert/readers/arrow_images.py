"""The images of a split of a Hugging Face data set: rows of Arrow files that are mapped, not read.

A row has the bytes of an image, or the path of a file.
"""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from convert.readers.directories import ListedFiles
from convert.readers.names import safe_key
from convert.readers.records import (
    IMAGE_SUFFIXES,
    MAX_IMAGE_BYTES,
    REENCODED_SUFFIXES,
    Defect,
    Record,
    as_text,
)
from rackrun.errors import DataError
from shards.index import Origin

BATCH = 1000  # rows that are listed at once


class ArrowRow(NamedTuple):
    """An image and its label, not read yet."""

    number: int
    path: str
    size: int | None  # of the stored bytes; None where there are none
    label: Any


class ArrowImages:
    """The images of a split; the offset of a record is the number of its row."""

    def __init__(self, name: str, rows: Any, columns: tuple[str, str], files: ListedFiles | None):
        """Take a `datasets.Dataset` and its columns of images and labels.

        `files` are those that rows may name by their paths.
        """
        self.name = as_text(name)
        self._rows = rows.select_columns(list(columns)).with_format("arrow")
        self._columns = columns
        self._files = files
        self._bytes = 0
        self._listing = sha256()

    def rows(self) -> Iterator[ArrowRow]:
        """Yield all rows; no image is read."""
        import pyarrow
        from pyarrow import compute

        image, label = self._columns
        for start in range(0, len(self._rows), BATCH):
            try:
                table = self._rows[start : start + BATCH]
                table.validate(full=True)
                sizes = compute.binary_length(compute.struct_field(table[image], "bytes"))
                paths = compute.struct_field(table[image], "path")
            except pyarrow.ArrowException as error:
                raise DataError(f"{self.name}: damaged: {error}; save it again") from None
            values = (sizes.to_pylist(), table[label].to_pylist(), paths.to_pylist())
            for number, (size, value, path) in enumerate(zip(*values, strict=True), start):
                yield ArrowRow(number, path or "", size, value)

    def record(self, row: ArrowRow, container: int) -> Record | None:
        """Return the record of a row, which lacks its label; None for a row without an image."""
        name, size = f"{self.name}/{row.number}{_suffix(row.path)}", row.size
        if size is None and row.path:
            name, size = self._find(row)
        if size is None:
            return None
        self._bytes += size
        self._listing.update(f"{name}\0{size}\0{row.label}\n".encode("utf-8", "surrogateescape"))
        key = f"{safe_key(self.name)}_{row.number:07d}"
        return Record(key, 0, "", name, container, row.number, row.size or 0, size)

    def origin(self) -> Origin:
        """Return the split's entry of the manifest; all rows must have been listed."""
        return Origin(self.name, self._bytes, self._listing.hexdigest())

    def read(self, record: Record) -> bytes:
        """Return the image of a record."""
        if not record.length and self._files:
            return self._files.read(record)
        if record.size > MAX_IMAGE_BYTES:
            raise Defect("too large", f"{record.size:,} bytes")
        data = self._rows[record.offset][self._columns[0]][0]["bytes"].as_py()
        if not isinstance(data, bytes) or len(data) != record.size:
            raise DataError(f"{record.name}: has changed since it was listed; add --force")
        return data

    def _find(self, row: ArrowRow) -> tuple[str, int]:
        where = f"{self.name}: row {row.number:,}: {row.path}"
        if self._files is None:
            raise DataError(
                f"{where}: a file, whose bytes are not stored in the data set; add --root FOLDER "
                "that holds all images"
            )
        return self._files.find(row.path, where)


def _suffix(path: str) -> str:
    """Return the suffix of an image's original name; empty where it has none."""
    suffix = PurePosixPath(path).suffix.lower()
    return suffix if suffix in (*IMAGE_SUFFIXES, *REENCODED_SUFFIXES) else ""
