"""The command that adds to a finished shard folder: images, or more tars of other programs."""

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from convert.folder import listing as listing_of_folder
from convert.options import Packing
from convert.packing.plan import VAL
from convert.packing.stored_samples import StoredSamples
from convert.readers.records import RecordListing
from convert.readers.webdataset_tars import LABEL_FIELD
from convert.table import Columns, ImageTable
from convert.versions.append_images import append_images
from convert.versions.append_tars import TarAppend, holds_tars
from convert.versions.parent import Parent
from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import UsageError
from rackrun.terminal import say

TABLES = (".csv", ".parquet", ".pq")
DEFAULT_VAL_PERCENT = 10.0
OF_IMAGES = ("test_percent", "exif", "check", "follow_links")
"""Options that tars of other programs do not have."""


@dataclass(frozen=True)
class Append:
    """Add images to a finished shard folder as its next version; its tars stay as they are."""

    examples: ClassVar[Examples] = (
        ("{prog} photos data/shards", "all images of photos/ that are not in it yet"),
        ("{prog} new.csv data/shards --root photos", "those that a table lists"),
        ("{prog} new.zip data/shards --val-percent 0", "a zip of class folders; all for training"),
        ("{prog} tars/ tars/", "tars of other programs that have come into their folder"),
    )

    source: Positional[Path]
    """Folder, zip or tar of class folders; CSV or Parquet file of paths and labels; or, for a
    folder of other programs' tars, more of these."""
    data: Positional[Path]
    """Finished shard folder."""
    columns: Columns = field(default_factory=Columns)
    val_percent: float | None = None
    """Percent of each class of the new images held out, unless SOURCE has a validation split;
    default: 10 if DATA has one, else 0."""
    test_percent: float = 0.0
    """Percent of each class of the new images set aside as the split test."""
    split: str = ""
    """Of other programs' tars: train, val or test; by default from each tar's name."""
    label_field: str = LABEL_FIELD
    """Of other programs' tars: field of .json members that holds the class."""
    exif: Literal["apply", "ignore"] = "apply"
    """apply: rotate JPEGs by their EXIF orientation."""
    check: Literal["structure", "decode"] = "structure"
    """decode: also decode every image, at some milliseconds of CPU each."""
    allow_left_out: int | None = None
    """Damaged images that may be left out; default: 1 %, or 10 % of a small set."""
    allow: tuple[Literal["leaks", "similar-classes", "dropped"], ...] = ()
    """leaks: copies of an image in several splits. similar-classes: class names that differ only by
    case, Unicode form or leading zeros. dropped: images that were dropped before. Repeatable."""
    follow_links: bool = False
    """Also follow symbolic links that lead out of SOURCE."""
    workers: int = 0
    """Number of processes; 0: one per core."""
    force: bool = False
    """Give up another change of DATA that was interrupted."""

    def run(self) -> None:
        """Append; what is interrupted goes on with the same command."""
        with Parent.locked(self.data) as parent:
            packing = self._packing(parent)
            if holds_tars(self.source):
                self._append_tars(parent, packing)
                return
            if not StoredSamples(parent.source).has_numbers:
                say(
                    f"{self.data}: other programs will find the class of new images as a number in"
                    " a .cls, that of the samples here in another form"
                )
            append_images(parent, self._listing(), packing, "dropped" in self.allow)

    def _append_tars(self, parent: Parent, packing: Packing) -> None:
        """Index more tars of other programs; UsageError for a folder that was converted."""
        if not parent.manifest.adopted and (self.source / MANIFEST_NAME).exists():
            raise UsageError(
                f"{self.source}: a folder of shards; append the images that it was made from, or "
                "train on both with --extra-data"
            )
        if not parent.manifest.adopted:
            raise UsageError(
                f"{self.source}: tars of samples, and {self.data} was converted from images; index "
                f"them on their own: {called('convert')} index {shlex.quote(str(self.source))} "
                "--out FOLDER, and train on both with --extra-data FOLDER"
            )
        for name in OF_IMAGES:
            if getattr(self, name) != getattr(Append, name):
                option = name.replace("_", "-")
                raise UsageError(f"--{option}: tars are added as they are; leave it out")
        packing = replace(packing, val_percent=self.val_percent or 0.0)
        TarAppend(parent, self.source, self.split, self.label_field, self.allow).run(packing)

    def _packing(self, parent: Parent) -> Packing:
        """Return the options of the conversion that made the folder, with those of this one."""
        manifest = parent.manifest
        holds_out = any(split.name == VAL for split in manifest.splits)
        default = min(DEFAULT_VAL_PERCENT, 90 - self.test_percent) if holds_out else 0.0
        return Packing(
            preset=parent.preset,
            seed=manifest.seed,
            tiles=manifest.tiles,
            extension=_extension(parent),
            val_percent=default if self.val_percent is None else self.val_percent,
            test_percent=self.test_percent,
            exif=self.exif,
            check=self.check,
            allow_left_out=self.allow_left_out,
            allow=tuple(each for each in self.allow if each != "dropped"),
            workers=self.workers,
            force=self.force,
        )

    def _listing(self) -> RecordListing:
        if self.source.suffix.lower() not in TABLES or self.source.is_dir():
            return listing_of_folder(self.source, "", self.follow_links, fewest=1)
        return ImageTable(self.source, self.data, self.columns).listing()


def _extension(parent: Parent) -> Literal["jpg", "true"]:
    """Return how images are called in the shards: true if one that is no JPEG is called so."""
    for split in parent.manifest.splits:
        rows = parent.source.index(split.name)
        others = rows[rows["format"] != b"jpg"]
        if len(others):
            row = others[0]
            shard, start = split.shards[int(row["shard"])], int(row["image_offset"]) - 512
            name = bytes(parent.source.read(shard, start, 100)).rstrip(b"\0")
            return "jpg" if name.lower().endswith((b".jpg", b".jpeg")) else "true"
    return "jpg"
