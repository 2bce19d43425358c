"""Tars in WebDataset's layout that other programs have written: an index and a manifest for them.

    tars -> in parallel: samples -> class, size and CRC-32 of each image, SHA-256 of the tar
         -> classes -> an index per split -> report -> manifest

No byte of the tars is changed. They may lie on a server that is only read.
"""

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME
from rackrun.convert.indexing.adoption import adopt
from rackrun.convert.indexing.tar_index import read_tars, refuse_duplicates
from rackrun.convert.indexing.tar_listing import list_tars
from rackrun.convert.options import Packing
from rackrun.convert.packing.finalize import counted, print_use, say_missing_classes, write_split
from rackrun.convert.packing.output_folder import REPORT_NAME
from rackrun.errors import UsageError
from rackrun.shards.class_names import LABEL_FIELD, named_classes
from rackrun.shards.index import Manifest


@dataclass(frozen=True)
class Index:
    """Write an index for WebDataset tars from other programs; the tars stay as they are."""

    examples: ClassVar[Examples] = (
        ("{prog} tars/ --split train", "index and manifest beside the tars"),
    )

    sources: Positional[tuple[str, ...]]
    """Folder with tars, tars, or URLs of tars; {0000..0511} stands for numbers."""
    out: Path | None = None
    """Folder for index and manifest, if the tars' own folder is read-only."""
    name: str = ""
    """Name of the data set; default: that of the first tar."""
    split: str = ""
    """Split of all tars: train, val or test; default: by the name of each tar."""
    val_percent: float = 0.0
    """Percent of the training images to hold out as val, in whole tars drawn by name; 0: none."""
    classes: Path | None = None
    """File with one class name per line, in the order of their numbers; default: the numbers."""
    label_field: str = LABEL_FIELD
    """Field of .json members that holds the class."""
    allow_left_out: int | None = None
    """Number of damaged samples that may be left out; default: 1 %, of a small set 10 %."""
    workers: int = 0
    """Number of processes; 0: one per core."""
    allow: tuple[Literal["leaks", "similar-classes", "unique-labels"], ...] = ()
    """leaks: copies of an image in several splits. similar-classes: class names that differ only by
    case or Unicode form. unique-labels: most classes have one image. Repeatable."""
    force: bool = False
    """Replace an existing index."""

    def run(self) -> None:
        """Index them."""
        packing = Packing(
            val_percent=self.val_percent,
            allow_left_out=self.allow_left_out,
            allow=self.allow,
            workers=self.workers,
        )
        command = f"{called('convert')} index {shlex.join(self.sources)}"
        listing = list_tars(self.sources, self.split, self.name, command)
        folder = self._folder(listing.folder)
        tars = read_tars(listing.tars, listing.url, folder, self.label_field, packing.processes)
        refuse_duplicates(tars)
        names = named_classes(self.classes) if self.classes else ()
        parts, classes, findings = adopt(
            replace(listing, tars=tuple(tars)),
            folder,
            packing,
            classes=names,
            has_all_classes=bool(self.classes),
        )
        say_missing_classes(parts, classes)
        manifest = Manifest(
            listing.dataset,
            classes,
            tuple(write_split(folder, listing.dataset, part) for part in parts),
            report=counted(findings),
            adopted=True,
            tars=listing.url,
        )
        write_whole(folder / MANIFEST_NAME, manifest.serialise())
        print_use(folder, listing.dataset)

    def _folder(self, beside: Path | None) -> Path:
        folder = self.out or beside
        if folder is None:
            raise UsageError(
                "the tars are on a server or in several folders: add --out FOLDER for their index"
            )
        with translated_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise UsageError(f"{folder}: cannot be written: add --out FOLDER for the index")
        for name in (MANIFEST_NAME, REPORT_NAME):
            if (folder / name).exists() and not self.force:
                raise UsageError(
                    f"{folder / name}: already exists; add --force to replace it, or --out FOLDER"
                )
        return folder
