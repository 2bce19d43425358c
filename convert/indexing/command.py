"""Tars in WebDataset's layout that other programs have written: an index and a manifest for them.

    tars -> in parallel: samples -> class, size and CRC-32 of each image, SHA-256 of the tar
         -> classes -> an index per split -> report -> manifest

No byte of the tars is changed. They may lie on a server that is only read.
"""

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME
from rackrun.convert.indexing.split_index import (
    IndexedTar,
    hold_out,
    link,
    named_tars,
    parts_of,
    refuse_duplicates,
    refuse_losses,
)
from rackrun.convert.indexing.tar_index import classes_of, index_tars
from rackrun.convert.indexing.tar_listing import list_tars
from rackrun.convert.packing.copies import ReadRange, copies, leaks_refused, local_files
from rackrun.convert.packing.finalize import print_use, write_split
from rackrun.convert.packing.output_folder import REPORT_NAME
from rackrun.convert.packing.plan import say_missing_classes
from rackrun.convert.packing.quality_report import print_report, save_report
from rackrun.convert.readers.class_order import classes_in
from rackrun.convert.readers.names import refuse_unique_labels
from rackrun.convert.readers.webdataset_tars import LABEL_FIELD, Label
from rackrun.errors import DataError, UsageError
from rackrun.machine import core_count
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
        if self.workers < 0 or (self.allow_left_out or 0) < 0:
            raise UsageError("--workers and --allow-left-out cannot be negative")
        if not 0 <= self.val_percent <= 90:
            raise UsageError(f"--val-percent {self.val_percent}: 0 to 90 is possible")
        command = f"{called('convert')} index {shlex.join(self.sources)}"
        listing = list_tars(self.sources, self.split, self.name, command)
        folder = self._folder(listing.folder)
        class_names = classes_in(self.classes) if self.classes else None
        indexed = index_tars(listing, folder, self.label_field, self.workers or core_count())
        if self.val_percent:
            listing = hold_out(listing, indexed, self.val_percent)
        classes, numbers = classes_of(indexed, class_names, "similar-classes" in self.allow)
        counts = sum((each.counts() for each in indexed), Counter[Label]())
        if "unique-labels" not in self.allow:
            refuse_unique_labels({str(label): count for label, count in counts.items()})
        refuse_duplicates(listing, indexed)
        findings = sorted(chain.from_iterable(each.findings for each in indexed))
        stored = sum(len(each.rows) for each in indexed)
        report = folder / REPORT_NAME
        save_report(report, findings, stored)
        advice = f"all names: {report}; if they are to be left out, add --force"
        refuse_losses(folder, findings, stored, self.allow_left_out, advice)
        if not stored:
            raise DataError(
                f"{folder}: no sample in the tars has an image and a class; a sample's key ends at "
                "the first dot of a name; its class is read from .cls, from the field of .json that"
                " --label-field names, or from .txt"
            )
        tars = named_tars(listing, indexed, folder)
        parts = parts_of(tars, numbers)
        say_missing_classes(
            {part.split: set(part.rows["label"].tolist()) for part in parts}, classes
        )
        findings += copies(parts, classes, _read_range(listing.url, tars))
        save_report(report, findings, stored)
        if "leaks" not in self.allow and (leaks := leaks_refused(findings)):
            raise DataError(
                f"{folder}: {leaks}; write the tars again without them, or add --force --allow "
                f"leaks; all names: {report}"
            )
        if not listing.url:
            link(tars, folder)
        manifest = Manifest(
            listing.dataset,
            classes,
            tuple(write_split(folder, listing.dataset, part) for part in parts),
            report=dict(sorted(Counter(finding.kind for finding in findings).items())),
            adopted=True,
            tars=listing.url,
        )
        write_whole(folder / MANIFEST_NAME, manifest.serialise())
        print_report(report, findings, stored)
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


def _read_range(url: str, tars: Sequence[IndexedTar]) -> ReadRange:
    if not url:
        return local_files({tar.name: tar.path for tar in tars}.__getitem__)
    from rackrun.shards.http_source import HttpSource

    return HttpSource(url).read
