"""Tars of other programs become the shards of a version: their names, splits, classes and rows.

tars and what is in each -> val held out -> classes -> shards and rows of each split
                         -> copies, leaks, report -> links to tars that lie elsewhere
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rackrun.atomic import translated_os_errors
from rackrun.convert.indexing.tar_index import TarIndex, classes_of
from rackrun.convert.indexing.tar_listing import TarListing
from rackrun.convert.options import Packing
from rackrun.convert.packing.copies import ReadRange, SplitRows, copies, leaks_refused, local_files
from rackrun.convert.packing.finalize import conclude, joined, losses_refused, may_be_lost
from rackrun.convert.packing.output_folder import report_name
from rackrun.convert.readers.names import refuse_similar, refuse_unique_labels
from rackrun.convert.readers.records import TRAIN, VAL, ImageDefect
from rackrun.convert.readers.webdataset_tars import Label
from rackrun.errors import DataError, UsageError
from rackrun.shards.http_source import HttpSource
from rackrun.shards.index import Shard, shard_name
from rackrun.terminal import say
from rackrun.units import plural

NO_SAMPLES = (
    "no sample in the tars has an image and a class; a sample's key ends at the first dot of a "
    "name; its class is read from .cls, from the field of .json that --label-field names, or from "
    ".txt"
)


class EarlierVersion(NamedTuple):
    """The version that tars are added to; the defaults are for a first version."""

    classes: tuple[str, ...] = ()
    has_all_classes: bool = False
    parts: Sequence[SplitRows] = ()
    number: int = 0
    """Of the version."""
    free_numbers: Mapping[str, int] = {}
    """By split, the first number in the name of a tar that no version has used."""


def adopt(
    listing: TarListing,
    indexed: Sequence[TarIndex],
    folder: Path,
    packing: Packing,
    earlier: EarlierVersion,
) -> tuple[list[SplitRows], tuple[str, ...], list[ImageDefect]]:
    """Make tars the shards of a version; return its splits, its classes, and the findings.

    The findings are saved in the folder, too, and printed. DataError where too many images are left
    out, or one leaks.
    """
    if packing.val_percent:
        listing = hold_out(listing, indexed, packing.val_percent)
    samples = sum(len(each.rows) for each in indexed)
    findings = sorted(chain.from_iterable(each.findings for each in indexed))
    images = samples + sum(finding.is_loss for finding in findings)
    allowed = may_be_lost(images) if packing.allow_left_out is None else packing.allow_left_out
    report = folder / report_name(earlier.number + 1)
    again = "" if earlier.number else " --force"  # which replaces this report
    if lost := losses_refused(
        findings, images, may_be_lost(images) if allowed is None else allowed
    ):
        conclude(report, findings, samples, lost + again)
    if not samples:
        conclude(report, findings, samples, NO_SAMPLES)
    classes, numbers = classes_of(indexed, earlier.classes, earlier.has_all_classes)
    if "similar-classes" not in packing.allow:
        refuse_similar(classes)
    if not earlier.parts and "unique-labels" not in packing.allow:
        counts = sum((each.counts() for each in indexed), Counter[Label]())
        refuse_unique_labels({str(label): count for label, count in counts.items()})
    tars = named_tars(listing, indexed, folder, earlier.free_numbers)
    parts = joined(earlier.parts, parts_of(tars, numbers))
    read: ReadRange
    if listing.url:
        read = HttpSource(listing.url).read
    else:
        paths = {tar.name: tar.path for tar in tars}
        read = local_files(lambda name: paths.get(name, folder / name))
    findings += copies(parts, classes, read, before=earlier.parts)
    leaks = "" if "leaks" in packing.allow else leaks_refused(findings)
    conclude(report, findings, samples, leaks and leaks + again)
    if not listing.url:
        link(tars, folder)
    return parts, classes, findings


class IndexedTar(NamedTuple):
    """A tar of a split: where it lies, the name by which it is read, and what is in it."""

    path: Path
    name: str
    split: str
    contents: TarIndex


def hold_out(listing: TarListing, indexed: Sequence[TarIndex], percent: float) -> TarListing:
    """Return the listing with some tars of train as val, drawn by their names and nothing else.

    Whole tars, because the rows of an index cover a tar without a gap: thus every byte is verified.
    """
    contents = dict(zip(listing.tars, indexed, strict=True))
    train = [tar for tar in listing.tars if tar.split == TRAIN and len(contents[tar].rows)]
    if any(tar.split == VAL for tar in listing.tars):
        raise UsageError("--val-percent: the tars have a split val; leave the option out")
    if len(train) < 2:
        raise UsageError(
            f"--val-percent holds out whole tars, and {plural(len(train), 'tar')} of train has "
            "samples; give more tars, or leave the option out"
        )
    train.sort(key=lambda tar: sha256(f"{VAL}:{tar.name}".encode()).digest())
    totals = list(accumulate(len(contents[tar].rows) for tar in train))
    enough = next(n for n, total in enumerate(totals, 1) if total >= totals[-1] * percent / 100)
    enough = min(enough, len(train) - 1)
    held_out, rest = train[:enough], train[enough:]
    remaining = set[Label]().union(*(contents[tar].labels for tar in rest))
    for tar in held_out:
        if missing := sorted(map(str, set(contents[tar].labels) - remaining)):
            raise DataError(
                f"{tar.path}: would be held out as val, and no tar that stays in train has class "
                f"{missing[0]}; shuffle the samples over the tars, or leave out --val-percent"
            )
    say(
        f"{enough} of {plural(len(train), 'tar')} with {totals[enough - 1]:,} of "
        f"{plural(totals[-1], 'image')} are held out as val"
    )
    tars = (tar._replace(split=VAL) if tar in held_out else tar for tar in listing.tars)
    return replace(listing, tars=tuple(tars))


def named_tars(
    listing: TarListing,
    indexed: Sequence[TarIndex],
    folder: Path,
    numbers: Mapping[str, int],
) -> list[IndexedTar]:
    """Return the tars that have samples, in order.

    Tars elsewhere than in the folder get names for links there; `numbers` has, by split, the first
    one that is free.
    """
    parents = {tar.path.parent.resolve() for tar in listing.tars}
    keep_names = bool(listing.url) or parents == {folder.resolve()}
    counts, tars = Counter(numbers), list[IndexedTar]()
    for tar, contents in zip(listing.tars, indexed, strict=True):
        name = tar.name if keep_names else shard_name(listing.dataset, tar.split, counts[tar.split])
        counts[tar.split] += 1
        if len(contents.rows):
            tars.append(IndexedTar(tar.path, name, tar.split, contents))
        else:
            say(f"{tar.name}: no samples in it: left out")
    return tars


def parts_of(tars: Sequence[IndexedTar], numbers: Mapping[Label, int]) -> Iterator[SplitRows]:
    """Yield shards and rows of each split; `numbers` are those of the classes."""
    by_split = defaultdict[str, list[IndexedTar]](list)
    for tar in tars:
        by_split[tar.split].append(tar)
    for split, of_split in by_split.items():
        shards, tables = [], []
        for number, (_, name, _, contents) in enumerate(of_split):
            rows = contents.rows.copy()
            rows["shard"] = number
            rows["label"] = np.array([numbers[each] for each in contents.labels])[rows["label"]]
            tables.append(rows)
            shards.append(Shard(name, len(rows), contents.size, contents.sha256))
        yield SplitRows(split, shards, np.concatenate(tables))


def link(tars: Sequence[IndexedTar], folder: Path) -> None:
    """Make links in a folder to the tars of this machine that do not lie there."""
    for tar in tars:
        path = folder.resolve() / tar.name
        if path == tar.path.parent.resolve() / tar.path.name:
            continue
        with translated_os_errors(path):
            if path.is_symlink():
                path.unlink()
            path.symlink_to(tar.path.resolve())
