"""The order of classes that a file gives: a name per line, by number."""

from dataclasses import replace
from pathlib import Path

from rackrun.convert.readers.records import RecordListing
from rackrun.errors import UsageError
from rackrun.terminal import clean


def classes_in(path: Path) -> tuple[str, ...]:
    """Return the classes of a file; UsageError if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--classes {path}: cannot be read: {why}") from None
    return tuple(line.strip() for line in lines)


def with_classes(listing: RecordListing, path: Path | None) -> RecordListing:
    """Return the listing with its classes in the order of a file, which has all of them."""
    if path is None:
        return listing
    names = classes_in(path)
    numbers = {name: number for number, name in enumerate(names)}
    if len(numbers) < len(names):
        raise UsageError(f"--classes {path}: a class is in it twice, or a line is empty")
    if unknown := [name for name in listing.classes if name not in numbers]:
        raise UsageError(clean(f"--classes {path}: no {unknown[0]!r} in it, a class of the source"))
    label_of = [numbers[name] for name in listing.classes]
    records = (record._replace(label=label_of[record.label]) for record in listing.records)
    return replace(listing, classes=names, records=records)
