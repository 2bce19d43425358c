"""Any folder of class folders: a user's own pictures.

SRC/<class>/…/picture.jpg          a part of each class is held out for validation
SRC/train/<class>/… and SRC/val/…  the parts are as the folders say
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tyro.conf import Positional

from convert.pack import pack
from convert.plan import TRAIN, VAL
from convert.records import PICTURE_SUFFIXES, Finding, Folder, Listing, Record, pictures, safe_key
from convert.settings import Packing
from shards.errors import DataError, UsageError

SPLITS = {"train": TRAIN, "val": VAL, "valid": VAL, "validation": VAL}
EXAMPLE = "expected SRC/<class>/<pictures>, or SRC/train/<class>/<pictures> and SRC/val/…"


@dataclass(frozen=True)
class FolderOfClasses:
    """A folder of class folders, with or without train/ and val/ above them."""

    source: Positional[Path]
    """Folder that holds a folder per class."""
    out: Positional[Path]
    """Folder for the shards; made if it is missing."""
    name: str = ""
    """Name of the data set in the shards' names; that of SOURCE if not given."""
    packing: Packing = field(default_factory=Packing)

    def run(self) -> None:
        """Convert."""
        pack(listing(self.source, self.name), self.packing, self.out)


def listing(source: Path, name: str = "") -> Listing:
    """The pictures below a folder of class folders."""
    if not source.is_dir():
        raise UsageError(f"{source}: there is no such folder; {EXAMPLE}")
    tops = _folders(source)
    has_splits = "train" in tops
    splits = [top for top in tops if top in SPLITS] if has_splits else []
    classes = _folders(source / "train") if has_splits else tops
    if len(classes) < 2:
        raise UsageError(
            f"{source}: {len(classes)} class folders in it, at least 2 are needed; {EXAMPLE}"
        )
    for split in splits:
        strange = sorted(set(_folders(source / split)) - set(classes))
        if strange:
            raise DataError(f"{source / split / strange[0]}: no class of train/ has that name")
    folder, found = Folder(source), list[Finding]()
    dataset = dataset_name(name or source.resolve().name)
    records = _records(folder, classes, has_splits, found)
    return Listing(dataset, tuple(classes), (folder,), records, found)


def dataset_name(text: str) -> str:
    """A name that shards can bear."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_") or "pictures"


def _folders(path: Path) -> list[str]:
    """The visible folders in a folder, sorted; those that a link points to as well."""
    return sorted(each.name for each in path.iterdir() if each.is_dir() and each.name[0] != ".")


def _records(
    folder: Folder, classes: list[str], has_splits: bool, found: list[Finding]
) -> Iterator[Record]:
    """The pictures in class folders; everything else is noted in `found`."""
    labels = {name: label for label, name in enumerate(classes)}
    counts: Counter[str] = Counter()
    taken: set[str] = set()
    for record in pictures(folder.records(), found):
        split, label, inner = _place(record.name, labels, has_splits)
        if label is None:
            found.append(Finding(record.name, "unlabelled"))
            continue
        key = _key(classes[label], inner)
        if key in taken:  # 1.jpg and 1.png of one class
            key = _key(classes[label], inner, with_suffix=True)
        taken.add(key)
        counts[classes[label]] += 1
        yield record._replace(key=key, label=label, split=split)
    empty = [name for name in classes if not counts[name]]
    if empty:
        raise DataError(
            f"{folder.root / empty[0]}: no pictures in this class folder ({_suffixes()})"
        )


def _place(
    name: str, labels: dict[str, int], has_splits: bool
) -> tuple[str, int | None, PurePosixPath]:
    """Split and label of a picture, and its path below the class folder."""
    parts = PurePosixPath(name).parts
    split = SPLITS.get(parts[0], "") if has_splits else ""
    inner = parts[1:] if has_splits else parts
    is_labelled = len(inner) > 1 and (split or not has_splits)
    label = labels.get(inner[0]) if is_labelled else None
    return split, label, PurePosixPath(*inner[1:])


def _key(class_name: str, inner: PurePosixPath, with_suffix: bool = False) -> str:
    """The class and the picture's name; the class only once where the name begins with it."""
    stem = str(inner.with_suffix("")).replace("/", "_")
    if with_suffix:
        stem += inner.suffix.replace(".", "_")
    return safe_key(stem if stem.startswith(f"{class_name}_") else f"{class_name}_{stem}")


def _suffixes() -> str:
    return ", ".join(PICTURE_SUFFIXES)
