"""Names that people gave, as names of data sets, classes and samples."""

import re
from collections.abc import Iterable
from hashlib import blake2b

from shards.writer import MAX_KEY_BYTES

MAX_NAME = 200  # characters of a class name: what is longer is a caption
UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


def dataset_name(text: str) -> str:
    """Return `text` with other characters than letters, digits and _ replaced."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_") or "pictures"


def is_class_name(text: str) -> bool:
    """Return True for text that can be shown as the name of a class."""
    return 0 < len(text) <= MAX_NAME and text.isprintable()


def class_table(labels: set[str]) -> dict[str, int]:
    """Return the number of each class: numbers in their order, names sorted."""
    are_numbers = all(label.isascii() and label.isdecimal() for label in labels)
    ordered = sorted(labels, key=int) if are_numbers else sorted(labels)
    return {label: number for number, label in enumerate(ordered)}


def is_meta(file: str) -> bool:
    """Return True for a file of a tar that describes it and is no sample, such as __info__.json."""
    stem = file.partition(".")[0]
    return stem.startswith("__") and stem.endswith("__")


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

    What is replaced or cut is made up for by eight characters of a hash, so that two names never
    become one key.
    """
    key = UNSAFE.sub("_", text)
    if key == text and len(key) <= MAX_KEY_BYTES and not is_meta(key):
        return key
    return _marked_key(text, text)


def _marked_key(text: str, name: str) -> str:
    """Make a key with eight characters of a hash of `name` in any case."""
    mark = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    return f"{UNSAFE.sub('_', text)[: MAX_KEY_BYTES - 9]}-{mark}"
