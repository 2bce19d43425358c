"""Tables of answers as CSV files: whole or not at all."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from rackrun.atomic import write_whole
from rackrun.errors import UsageError


def as_csv(rows: Iterable[Sequence[object]]) -> bytes:
    """Return rows as CSV in UTF-8; a name that is no text keeps its bytes."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="surrogateescape")


def write_table(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write rows as a CSV file."""
    write_whole(path, as_csv(rows))


def require_folder(path: str) -> None:
    """Raise UsageError for a file that cannot be written since its folder is missing."""
    if path and not Path(path).parent.is_dir():
        raise UsageError(f"{path}: no folder {Path(path).parent}; type: mkdir -p its name")
