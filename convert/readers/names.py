"""Names that people gave, as names of data sets, classes and samples."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b

from rackrun.errors import DataError
from rackrun.shards.class_names import WHOLE_NUMBER
from rackrun.shards.samples import is_meta
from rackrun.shards.writer import MAX_KEY_BYTES
from rackrun.terminal import clean

FEWEST_UNIQUE = 10  # labels: fewer may be a trial
UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


def dataset_name(text: str) -> str:
    """Return `text` with other characters than letters, digits and _ replaced."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_") or "pictures"


def class_table(labels: set[str]) -> dict[str, int]:
    """Return the number of each class: numbers in their order, names sorted."""
    ordered = sorted(labels)  # also among "1" and "01", or their order would be that of the set
    if all(map(_is_number, labels)):
        ordered.sort(key=int)
    return {label: number for number, label in enumerate(ordered)}


def class_names(labels: set[str]) -> dict[str, str]:
    """Return the name of the class of each label: 1 for 1.0 where all labels are whole numbers.

    Tables have such numbers where a cell of the column is empty, or was.
    """
    if all(map(WHOLE_NUMBER.fullmatch, labels)):
        return {label: label.partition(".")[0] for label in labels}
    return {label: label for label in labels}


def refuse_similar(classes: Iterable[str]) -> None:
    """Raise DataError for two classes whose names differ only in a way that people rarely mean."""
    for name, other in similar(classes):
        printed_alike = unicodedata.normalize("NFC", name) == unicodedata.normalize("NFC", other)
        shown = [ascii(each) if printed_alike else repr(each) for each in (name, other)]
        raise DataError(
            clean(
                f"classes {shown[0]} and {shown[1]} differ only by case, blanks, Unicode form or "
            )
            + "leading zeros; make them one, or add --allow similar-classes"
        )


def similar(classes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of classes that differ only by case, blanks, Unicode form or leading zeros."""
    names: dict[str, str] = {}
    for name in classes:
        # Once more after casefold, which may take a composed letter apart.
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        folded = " ".join(folded.split())
        if _is_number(name):
            folded = name.lstrip("0") or "0"
        other = names.setdefault(folded, name)
        if other != name:
            yield other, name


def refuse_unique_labels(images: Mapping[str, int]) -> None:
    """Raise DataError for labels of which most have one image: captions, ids, names of files."""
    unique = [label for label, count in images.items() if count == 1]
    if len(images) < FEWEST_UNIQUE or 2 * len(unique) <= len(images):
        return
    raise DataError(
        clean(
            f"{len(unique):,} of {len(images):,} classes have one image, such as "
            f"{unique[0][:60]!r}: captions or ids, which no model can learn as classes; name what "
            "holds the class, as by --label-column or --label-field; if these are the classes, add "
        )
        + "--allow unique-labels"
    )


def _is_number(label: str) -> bool:
    return label.isascii() and label.isdecimal()


def free_key(stems: Iterable[str], name: str, taken: set[str]) -> str:
    """Return the first of these stems whose key is free, else one with a hash of `name`.

    Keys differ by more than their case, for those who unpack the shards where that is no
    difference. The key is taken from then on.
    """
    stems = list(stems)
    free = (key for key in map(safe_key, stems) if key.lower() not in taken)
    key = next(free, "") or _marked_key(stems[0], name)
    taken.add(key.lower())
    return key


def safe_key(text: str) -> str:
    """Make a key of a name: other characters than letters, digits, _ and - become _.

    What is replaced or cut is compensated by eight characters of a hash, so that two names never
    become one key.
    """
    key = UNSAFE.sub("_", text)
    if key == text and len(key) <= MAX_KEY_BYTES and not is_meta(key):
        return key
    return _marked_key(text, text)


def _marked_key(text: str, name: str) -> str:
    mark = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    return f"{UNSAFE.sub('_', text)[: MAX_KEY_BYTES - 9]}-{mark}"
