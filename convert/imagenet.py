"""ImageNet-1k (ILSVRC2012) as it is found on disks, read where it lies.

- the official archives: ILSVRC2012_img_train.tar (a tar of 1,000 tars), ILSVRC2012_img_val.tar and
  ILSVRC2012_devkit_t12.tar.gz in one folder; images are read by offset, nothing is extracted
- folders: train/<wnid>/ and val/<wnid>/
- folders: train/<wnid>/ and a flat val/, with the devkit (packed or not) or LOC_val_solution.csv
- Kaggle's ILSVRC/Data/CLS-LOC/{train,val} with its LOC_val_solution.csv, as a tree or as its zip

The number of a class is the rank of its wnid among all wnids in sorted order, which is what every
published model uses. The devkit counts in another order; its numbers become wnids through a table
(convert/synsets.txt) and go no further. Names are not unique ("crane" is a bird and a machine): a
class is its wnid.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple

from rackrun.commandline.options import Examples, Positional
from rackrun.convert.devkit import DEVKIT, LARGEST, SOLUTION, WNID, ReadText, Truth, beside, words
from rackrun.convert.images.info import LEFT_OUT
from rackrun.convert.options import Packing
from rackrun.convert.packing.pack import pack
from rackrun.convert.readers.directories import Folder
from rackrun.convert.readers.names import safe_key
from rackrun.convert.readers.records import (
    TRAIN,
    Container,
    Defect,
    Listed,
    Record,
    RecordListing,
    as_text,
    is_image,
    reading,
)
from rackrun.convert.readers.tars import Tar
from rackrun.convert.readers.zips import Zip
from rackrun.errors import DataError, UsageError
from rackrun.shards.class_names import MOST_CLASSES, lines_of
from rackrun.units import whole_number

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DECOY = "ILSVRC2012_img_train_t3"

OFFICIAL = {"train": 1_281_167, "val": 50_000}
OFFICIAL_CLASSES = 1000
OFFICIAL_PER_CLASS = {"train": range(732, 1301), "val": range(50, 51)}

TREES = ("", "CLS-LOC", "Data/CLS-LOC", "ILSVRC/Data/CLS-LOC")  # where train/ and val/ may lie
IMAGE_PATH = re.compile(r"(?:.*/)?(?P<split>train|val)/(?:(?P<wnid>n\d{8})/)?(?P<file>[^/]+)")

SHARDS = 1024  # of the full training set


@dataclass(frozen=True)
class ImagenetPart:
    """The part of the data set that is converted."""

    classes: str = ""
    """Only these wnids, separated by commas; a file with one per line, in the order of their
    numbers; or a number: the first N in sorted order."""
    subset: bool = False
    """SOURCE has only a part of ImageNet: do not compare its counts with the official ones."""

    def __post_init__(self) -> None:
        if whole_number(self.classes, MOST_CLASSES) == 0:
            raise UsageError("--classes 0: 1 or more is possible; leave it out for all")

    @property
    def partial(self) -> bool:
        """True if the official counts cannot be expected."""
        return bool(self.subset or self.classes)


@dataclass(frozen=True)
class Imagenet:
    """ImageNet-1k: the official archives, class folders, Kaggle's tree or its zip."""

    examples: ClassVar[Examples] = (
        ("{prog} ILSVRC data/imagenet", "the folder of the archives, or as they were extracted"),
        ("{prog} ILSVRC data/imagenet --short-side 256", "smaller images, which load faster"),
    )

    source: Positional[Path]
    """Folder with the archives or the images, or Kaggle's zip."""
    out: Positional[Path]
    """Folder for the shards; created if it is missing."""
    choice: ImagenetPart = field(default_factory=ImagenetPart)
    packing: Packing = field(default_factory=Packing)

    def run(self) -> None:
        """Convert it; the full data set into 1,024 training shards, unless --shards is given."""
        packing = self.packing
        if not self.choice.partial:
            packing = replace(packing, shards=packing.shards or SHARDS)
        pack(listing(self.source, self.choice), packing, self.out)


Entry = tuple[str, Record]
"""The wnid of an image, empty where only the ground truth knows it; its record without a label."""


def listing(source: Path, choice: ImagenetPart) -> RecordListing:
    """List the images of ImageNet at `source`.

    UsageError if there is nothing of the kind, DataError if it is damaged or not complete; the
    counts are known, and compared, once the records are exhausted.
    """
    _refuse_decoy(source)
    store = _open(source)
    truth = Truth(store.text)
    wnids = _chosen(sorted(store.wnids), choice, source)
    names = words()
    classes = tuple(as_text(f"{wnid} {names.get(wnid, '')}".strip()) for wnid in wnids)
    counted = _counted(_labeled(store, truth, wnids), wnids, choice, source)
    return RecordListing(
        "imagenet",
        classes,
        store.containers,
        counted,
        needs_all=not choice.partial,
        as_published=True,
        no_val=f"{source}: no val/ beside train/, and no {VAL_TAR}",
    )


class ImagenetFiles(NamedTuple):
    """ImageNet in one of the forms in which it is stored on disks."""

    containers: tuple[Container, ...]
    wnids: set[str]
    """The classes of the training images."""
    entries: Iterator[Entry]
    text: ReadText
    """Returns a file that lies beside the images, or in the devkit."""


def _official(root: Path) -> ImagenetFiles:
    """Return the images of the two tars in a folder, the training images nested two deep."""
    train, val = Tar(root / TRAIN_TAR), Tar(root / VAL_TAR)
    class_tars = {
        PurePosixPath(member.name).stem: member
        for member in train.members()
        if member.name.endswith(".tar")
    }

    def entries() -> Iterator[Entry]:
        for wnid, class_tar in class_tars.items():
            for member in train.members(class_tar):
                if is_image(member.name):
                    name = f"{class_tar.name}/{member.name}"
                    yield wnid, member._replace(key=_key(name), split="train", name=name)
        for member in val.members():
            if is_image(member.name):
                yield "", member._replace(key=_key(member.name), split="val", container=1)

    return ImagenetFiles((train, val), {*class_tars}, entries(), partial(beside, root))


def _tree(root: Path) -> ImagenetFiles:
    """Return the images below folders called train and val."""
    folder, wnids = Folder(root), set[str]()
    with reading(root):
        for train in (root / tree / "train" for tree in TREES):
            if train.is_dir():
                wnids.update(path.name for path in train.iterdir() if WNID.fullmatch(path.name))
    return ImagenetFiles((folder,), wnids, _entries(folder.records()), partial(beside, root))


def _kaggle_zip(path: Path) -> ImagenetFiles:
    """Return the images of the archive of Kaggle's competition."""
    archive, wnids, solutions = Zip(path), set[str](), list[Record]()
    for member in archive.records():
        match = IMAGE_PATH.fullmatch(member.name)
        if match and match["split"] == "train" and match["wnid"] and is_image(member.name):
            wnids.add(match["wnid"])
        elif PurePosixPath(member.name).name == SOLUTION and isinstance(member, Record):
            solutions = [member]

    def text(name: str) -> bytes | None:
        if name != SOLUTION or not solutions:
            return None
        try:
            if solutions[0].size > LARGEST:
                raise Defect("too large")
            data = archive.read(solutions[0])
            if zlib.crc32(data) != solutions[0].crc:
                raise Defect("checksum")
            return data
        except Defect as defect:
            why = LEFT_OUT[defect.kind]
            raise DataError(f"{path}: {solutions[0].name}: {why}") from None

    return ImagenetFiles((archive,), wnids, _entries(archive.records()), text)


def _open(source: Path) -> ImagenetFiles:
    if source.is_dir():
        wnid = "n" + "[0-9]" * 8
        has_class_folders = any(
            all(any((source / tree / split).glob(wnid)) for split in ("train", "val"))
            for tree in TREES
        )
        # Sorted folders beside the tars come first: they need no devkit.
        has_tars = (source / TRAIN_TAR).exists() or (source / VAL_TAR).exists()
        if has_tars and not has_class_folders:
            return _official(source)
        return _tree(source)
    if source.suffix == ".zip":
        return _kaggle_zip(source)
    if source.exists():
        raise UsageError(
            f"{source}: give the folder that holds {TRAIN_TAR}, {VAL_TAR} and {DEVKIT}.tar.gz"
        )
    raise UsageError(f"{source}: there is no such file or folder")


def _refuse_decoy(source: Path) -> None:
    alone = source.is_dir() and not (source / TRAIN_TAR).exists()
    if source.name.startswith(DECOY) or (alone and any(source.glob(f"{DECOY}*"))):
        raise UsageError(
            f"{source}: {DECOY}.tar is the training set of another task (dogs in detail); "
            f"ImageNet-1k is {TRAIN_TAR}"
        )


def _key(name: str) -> str:
    return safe_key(PurePosixPath(name).stem)


def _entries(files: Iterable[Listed]) -> Iterator[Entry]:
    for record in files:
        match = IMAGE_PATH.fullmatch(record.name)
        if match and is_image(record.name) and isinstance(record, Record):
            named = record._replace(key=_key(record.name), split=match["split"])
            yield match["wnid"] or "", named


def _chosen(wnids: list[str], choice: ImagenetPart, source: Path) -> list[str]:
    if not wnids:
        what = "no ImageNet here: no training images in folders train/n01440764 …"
        hint = f"; give {source.absolute().parent}" if source.name == TRAIN else ""
        raise UsageError(f"{source}: {what}{hint}")
    if not choice.classes:
        return wnids
    count = whole_number(choice.classes, MOST_CLASSES)
    if count is not None:
        return wnids[:count]
    asked = sorted(set(choice.classes.split(",")))
    if (
        len(asked) == 1 and Path(choice.classes).is_file()
    ):  # ImageNet-100: a wnid a line, with or without its name
        lines = lines_of(Path(choice.classes))
        asked = list(dict.fromkeys(line.partition(" ")[0] for line in lines if line))
    missing = [wnid for wnid in asked if wnid not in wnids]
    if missing:
        raise UsageError(f"--classes: {source} has no class {', '.join(missing)}")
    return asked


def _labeled(store: ImagenetFiles, truth: Truth, wnids: list[str]) -> Iterator[Record]:
    ranks = {wnid: rank for rank, wnid in enumerate(wnids)}
    for wnid, record in store.entries:
        class_wnid = wnid or truth.wnid(PurePosixPath(record.name).stem)
        if class_wnid not in store.wnids:
            raise DataError(f"{record.name}: shows {class_wnid}, a class without training images")
        if class_wnid in ranks:
            yield record._replace(label=ranks[class_wnid])


def _counted(
    records: Iterator[Record], wnids: list[str], choice: ImagenetPart, source: Path
) -> Iterator[Record]:
    counts: Counter[tuple[str, int]] = Counter()
    for record in records:
        counts[record.split, record.label] += 1
        yield record
    totals = Counter({split: 0 for split in OFFICIAL})
    for (split, _), count in counts.items():
        totals[split] += count
    usual = all(count in OFFICIAL_PER_CLASS[split] for (split, _), count in counts.items())
    if choice.partial or (totals == OFFICIAL and len(wnids) == OFFICIAL_CLASSES and usual):
        return
    raise DataError(
        f"{source}: {len(wnids):,} classes, {totals['train']:,} training and {totals['val']:,} "
        f"validation images; ImageNet-1k has {OFFICIAL_CLASSES:,}, {OFFICIAL['train']:,} and "
        f"{OFFICIAL['val']:,}, of each class 732 to 1,300 and 50; if a part is meant, add --subset"
    )
