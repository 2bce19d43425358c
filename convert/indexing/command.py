"""Tars in WebDataset's layout that other programs have written: an index and a manifest for them.

    tars -> in parallel: samples -> class, size and CRC-32 of each image, SHA-256 of the tar
         -> val held out -> classes -> rows of each split -> copies, leaks, report
         -> links to tars that lie elsewhere -> an index per split -> manifest

No byte of the tars is changed.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME
from rackrun.convert.indexing.adoption import class_counts, held_out, link, named, splits_of
from rackrun.convert.indexing.tar_index import (
    ForeignTar,
    classes_of,
    read_tars,
    refuse_duplicates,
)
from rackrun.convert.indexing.tar_listing import dataset_of, list_tars
from rackrun.convert.options import Packing
from rackrun.convert.packing.copies import ReadRange, copies, leaks_refused
from rackrun.convert.packing.finalize import (
    conclude,
    counted,
    losses_refused,
    print_use,
    say_missing_classes,
    write_split,
)
from rackrun.convert.packing.output_folder import REPORT_NAME
from rackrun.convert.readers.names import dataset_name, refuse_similar, refuse_unique_labels
from rackrun.convert.readers.records import ImageDefect
from rackrun.convert.readers.webdataset_tars import Label
from rackrun.errors import UsageError
from rackrun.shards.class_names import LABEL_FIELD, named_classes
from rackrun.shards.folder import FolderSource
from rackrun.shards.index import Manifest, Shard

NO_SAMPLES = (
    "no sample in the tars has an image (jpg, png, webp, gif, bmp) and a class; a sample's key "
    "ends at the first dot of a name; its class is read from .cls, from the field of .json that "
    "--label-field names, or from .txt; if folders in the tar are the classes, use convert folder"
)


@dataclass(frozen=True)
class Index:
    """Write an index for WebDataset tars from other programs; the tars stay as they are."""

    examples: ClassVar[Examples] = (
        ("{prog} tars/ --split train", "index and manifest beside the tars"),
    )

    sources: Positional[tuple[str, ...]]
    """Folder with tars, or tars."""
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
        packing = Packing(  # it has limits for these options
            val_percent=self.val_percent,
            allow_left_out=self.allow_left_out,
            allow=self.allow,
            workers=self.workers,
        )
        command = f"{called('convert')} index {shlex.join(self.sources)}"
        tars = list_tars(self.sources, self.split, command)
        folder = self._folder({tar.path.parent.resolve() for tar in tars})
        dataset = dataset_name(self.name) if self.name else dataset_of(tars)
        tars = read_tars(tars, self.label_field, packing.processes)
        refuse_duplicates(tars)
        if packing.val_percent:
            tars = held_out(tars, packing.val_percent)
        findings = sorted(chain.from_iterable(tar.findings for tar in tars))
        classes, numbers = self._classes(tars, findings, folder)
        tars = named(tars, folder, dataset)
        splits = splits_of(tars, numbers)
        findings += copies(splits, classes, _reader(tars))
        leaks = "" if "leaks" in self.allow else leaks_refused(findings)
        conclude(folder / REPORT_NAME, findings, _samples(tars), leaks and f"{leaks} --force")
        link(tars, folder)
        say_missing_classes(splits, classes)
        manifest = Manifest(
            dataset,
            classes,
            tuple(write_split(folder, dataset, split) for split in splits),
            report=counted(findings),
            adopted=True,
        )
        write_whole(folder / MANIFEST_NAME, manifest.serialize())
        print_use(folder, dataset)

    def _folder(self, beside: set[Path]) -> Path:
        if not self.out and len(beside) > 1:
            raise UsageError("the tars are in several folders: add --out FOLDER for their index")
        folder = self.out or beside.pop()
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

    def _classes(
        self, tars: Sequence[ForeignTar], findings: list[ImageDefect], folder: Path
    ) -> tuple[tuple[str, ...], dict[Label, int]]:
        """Return the classes and the number of each label; DataError for what is no data set."""
        samples = _samples(tars)
        images = samples + sum(finding.is_loss for finding in findings)
        wrong = losses_refused(findings, images, self.allow_left_out)
        if wrong or not samples:
            why = f"{wrong} --force" if wrong else NO_SAMPLES  # which replaces the report
            conclude(folder / REPORT_NAME, findings, samples, why)
        classes, numbers = classes_of(tars, named_classes(self.classes) if self.classes else ())
        if "similar-classes" not in self.allow:
            refuse_similar(classes)
        if "unique-labels" not in self.allow:
            refuse_unique_labels(class_counts(tars))
        return classes, numbers


def _samples(tars: Sequence[ForeignTar]) -> int:
    return sum(len(tar.rows) for tar in tars)


def _reader(tars: Sequence[ForeignTar]) -> ReadRange:
    """Return what reads the tars where they lie: there are no links to them yet."""
    paths = {tar.name: tar.path for tar in tars}

    def read(shard: Shard, offset: int, length: int) -> bytes:
        return FolderSource.part(paths[shard.name], shard, offset, length)

    return read
