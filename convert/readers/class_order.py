"""The classes that a file chooses, in its order: one name per line."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

from rackrun.convert.readers.records import ImageDefect, Listed, RecordListing
from rackrun.errors import UsageError
from rackrun.shards.class_names import lines_of
from rackrun.terminal import clean, say
from rackrun.units import first_few

NAMED = 5  # classes that a line names


def with_classes(listing: RecordListing, path: Path | None) -> RecordListing:
    """Return the listing with the classes of a file, in its order; the others are left out."""
    if path is None:
        return listing
    names = lines_of(path)
    numbers = {normalize("NFC", name): number for number, name in enumerate(names)}
    if len(numbers) < len(names) or "" in numbers:
        raise UsageError(f"--classes {path}: a class is in it twice, or a line is empty")
    # macOS takes the letters in names of files apart, which nobody sees.
    number_of = [numbers.get(normalize("NFC", name)) for name in listing.classes]
    pairs = zip(listing.classes, number_of, strict=True)
    left_out = [name for name, number in pairs if number is None]
    count = f"{len(left_out):,} of the {len(listing.classes):,} classes of the source"
    if len(names) < 2 or len(left_out) == len(listing.classes):
        such = f", such as {left_out[0]!r}" if left_out else ""
        raise UsageError(
            clean(f"--classes {path}: {count} are not in it{such}; two at least") + " are needed"
        )
    if left_out:
        say(clean(f"--classes {path}: {count} are left out: {first_few(left_out, NAMED)}"))

    def numbered() -> Iterator[Listed]:
        for each in listing.records:
            if isinstance(each, ImageDefect):
                yield each
            elif (number := number_of[each.label]) is not None:
                yield each._replace(label=number)

    return replace(listing, classes=names, records=numbered())
