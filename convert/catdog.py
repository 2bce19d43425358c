"""Cats and dogs, in every form in which they are published.

- Kaggle's `train.zip` (`train/cat.0.jpg` … `train/dog.12499.jpg`), as it is or still inside the
  zip of the competition;
- Microsoft's `kagglecatsanddogs_5340.zip` (`PetImages/Cat/0.jpg` …);
- any zip or folder whose images are named, or lie in folders named, cat(s) and dog(s).

Nothing is unpacked. There is no official validation part: a tenth of each class is held out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.convert.options import Packing
from rackrun.convert.packing.pack import pack
from rackrun.convert.readers.directories import Folder
from rackrun.convert.readers.names import safe_key
from rackrun.convert.readers.records import ImageDefect, Listed, Record, RecordListing, images
from rackrun.convert.readers.zips import Zip
from rackrun.errors import DataError, UsageError
from rackrun.terminal import say
from rackrun.units import data_size

CLASSES = ("cat", "dog")
NAMED = re.compile(r"(cat|dog)s?[._ -]?\d+", re.IGNORECASE)
IN_FOLDER = re.compile(r"(cat|dog)s?", re.IGNORECASE)
INNER = "train.zip"
EXPECTED = "images named cat.0.jpg, or in folders Cat and Dog"


@dataclass(frozen=True)
class Catdog:
    """Cats and dogs: Kaggle's train.zip, Microsoft's PetImages zip, or a folder."""

    examples: ClassVar[Examples] = (
        ("{prog} train.zip data/catdog", "Kaggle's train.zip, or Microsoft's archive"),
    )

    source: Positional[Path]
    """Archive or folder with the images."""
    out: Positional[Path]
    """Folder for the shards; created if it is missing."""
    packing: Packing = field(default_factory=Packing)

    def run(self) -> None:
        """Convert."""
        pack(listing(self.source, self.out), self.packing, self.out)


def listing(source: Path, scratch: Path) -> RecordListing:
    """List the images of an archive or a folder; an inner zip may be unpacked into `scratch`."""
    container = _container(source, scratch)
    records = _records(container, source)
    return RecordListing("catdog", CLASSES, (container,), records, as_published=True)


def _container(source: Path, scratch: Path) -> Zip | Folder:
    if source.is_dir():
        inner = source / INNER
        return _archive(inner, scratch) if inner.is_file() else Folder(source)
    if not source.exists():
        raise UsageError(f"{source}: there is no such file or folder")
    return _archive(source, scratch)


def _archive(path: Path, scratch: Path) -> Zip:
    archive = Zip(path)
    for member in archive.records():
        if isinstance(member, Record) and PurePosixPath(member.name).name == INNER:
            say(f"{path}: reading the {INNER} inside it, {data_size(member.size)}")
            return archive.within(member, scratch)
    return archive


def _records(container: Zip | Folder, source: Path) -> Iterator[Listed]:
    labels = set[int]()
    for each in images(container.records()):
        if isinstance(each, ImageDefect):
            yield each
        elif (label := label_of(each.name)) is None:
            yield ImageDefect(each.name, "unlabeled")
        else:
            labels.add(label)
            yield each._replace(key=_key_of(each.name, label), label=label)
    if missing := [name for label, name in enumerate(CLASSES) if label not in labels]:
        raise DataError(
            f"{source}: no image of a {' or a '.join(missing)} in it; expected {EXPECTED} "
            "(Kaggle's test1.zip has no labels, train.zip has)"
        )


def label_of(name: str) -> int | None:
    """Return the class by the name of an image or of its folder; None if neither names one."""
    path = PurePosixPath(name)
    by_name = NAMED.fullmatch(path.stem)
    by_folder = IN_FOLDER.fullmatch(path.parent.name)
    classes = {match[1].lower() for match in (by_name, by_folder) if match}
    if len(classes) > 1:
        raise DataError(f"{name}: its name and its folder name different classes")
    return CLASSES.index(classes.pop()) if classes else None


def _key_of(name: str, label: int) -> str:
    # cat_00000 for cat.0.jpg and for Cat/0.jpg, so that both archives give the same keys.
    stem = PurePosixPath(name).stem
    number = re.fullmatch(r"(?:(?:cat|dog)s?[._ -]?)?([0-9]+)", stem, re.IGNORECASE)
    tail = number[1].lstrip("0").zfill(5) if number else stem
    return safe_key(f"{CLASSES[label]}_{tail}")
