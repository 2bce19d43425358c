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
from types import MappingProxyType

import numpy as np

from rackrun.atomic import translated_os_errors
from rackrun.convert.indexing.tar_index import ForeignTar, classes_of
from rackrun.convert.indexing.tar_listing import TarListing
from rackrun.convert.options import Packing
from rackrun.convert.packing.copies import SplitRows, copies, leaks_refused
from rackrun.convert.packing.finalize import conclude, joined, losses_refused
from rackrun.convert.packing.output_folder import report_name
from rackrun.convert.readers.names import refuse_similar, refuse_unique_labels
from rackrun.convert.readers.records import TRAIN, VAL, ImageDefect
from rackrun.convert.readers.webdataset_tars import Label
from rackrun.errors import DataError, UsageError
from rackrun.shards.folder import FolderSource
from rackrun.shards.http_source import HttpSource
from rackrun.shards.index import Shard, shard_name
from rackrun.shards.source import Stored
from rackrun.terminal import say
from rackrun.units import plural

NO_SAMPLES = (
    "no sample in the tars has an image (jpg, png, webp, gif, bmp) and a class; a sample's key "
    "ends at the first dot of a name; its class is read from .cls, from the field of .json that "
    "--label-field names, or from .txt; if folders in the tar are the classes, use convert folder"
)


def adopt(
    listing: TarListing,
    folder: Path,
    packing: Packing,
    version: int = 1,
    before: Sequence[SplitRows] = (),
    classes: tuple[str, ...] = (),
    has_all_classes: bool = False,
    free_numbers: Mapping[str, int] = MappingProxyType({}),
) -> tuple[list[SplitRows], tuple[str, ...], list[ImageDefect]]:
    """Make tars the shards of a version; return its splits, its classes, and the findings.

    The findings are saved in the folder, too, and printed. DataError where too many images are left
    out, or one leaks. `before`, `classes`, `free_numbers`: the splits and classes of the version
    that the tars join, and by split the first number that no version has used in a name.
    """
    if packing.val_percent:
        listing = replace(listing, tars=_held_out(listing.tars, packing.val_percent))
    samples = sum(len(tar.rows) for tar in listing.tars)
    findings = sorted(chain.from_iterable(tar.findings for tar in listing.tars))
    images = samples + sum(finding.is_loss for finding in findings)
    report = folder / report_name(version)
    again = " --force" if version == 1 else ""  # which replaces this report
    if lost := losses_refused(findings, images, packing.allow_left_out):
        conclude(report, findings, samples, lost + again)
    if not samples:
        conclude(report, findings, samples, NO_SAMPLES)
    classes, numbers = classes_of(listing.tars, classes, has_all_classes)
    if "similar-classes" not in packing.allow:
        refuse_similar(classes)
    if not before and "unique-labels" not in packing.allow:
        refuse_unique_labels(_counts(listing.tars))
    tars = _named(listing, folder, free_numbers)
    parts = joined(before, _parts(tars, numbers))
    paths = {tar.name: tar.path for tar in tars}
    server = HttpSource(listing.url) if listing.url else None

    def read(shard: Shard, offset: int, length: int) -> Stored:
        if server:
            return server.read(shard, offset, length)
        path = paths.get(shard.name, folder / shard.name)
        return FolderSource.part(path, shard, offset, length)

    findings += copies(parts, classes, read, before=before)
    leaks = "" if "leaks" in packing.allow else leaks_refused(findings)
    conclude(report, findings, samples, leaks and leaks + again)
    if not listing.url:
        _link(tars, folder)
    return parts, classes, findings


def _held_out(tars: Sequence[ForeignTar], percent: float) -> tuple[ForeignTar, ...]:
    """Return the tars, some of train as val, drawn by their names and nothing else.

    Whole tars, because a tar is a shard of one split.
    """
    train = [tar for tar in tars if tar.split == TRAIN and len(tar.rows)]
    if any(tar.split == VAL for tar in tars):
        raise UsageError("--val-percent: the tars have a split val; leave the option out")
    if len(train) < 2:
        raise UsageError(
            f"--val-percent holds out whole tars, and {plural(len(train), 'tar')} of train has "
            "samples; give more tars, or leave the option out"
        )
    train.sort(key=lambda tar: sha256(f"{VAL}:{tar.name}".encode()).digest())
    totals = list(accumulate(len(tar.rows) for tar in train))
    enough = next(n for n, total in enumerate(totals, 1) if total >= totals[-1] * percent / 100)
    enough = min(enough, len(train) - 1)
    remaining = set[Label]().union(*(tar.labels for tar in train[enough:]))
    for tar in train[:enough]:
        if missing := sorted(map(str, set(tar.labels) - remaining)):
            raise DataError(
                f"{tar.path}: would be held out as val, and no tar that stays in train has class "
                f"{missing[0]}; shuffle the samples over the tars, or leave out --val-percent"
            )
    say(
        f"{enough} of {plural(len(train), 'tar')} with {totals[enough - 1]:,} of "
        f"{plural(totals[-1], 'image')} are held out as val"
    )
    drawn = {tar.path for tar in train[:enough]}
    return tuple(replace(tar, split=VAL) if tar.path in drawn else tar for tar in tars)


def _counts(tars: Sequence[ForeignTar]) -> Counter[str]:
    """Return the number of samples of each label."""
    counts = Counter[str]()
    for tar in tars:
        of_tar = np.bincount(tar.rows["label"], minlength=len(tar.labels)).tolist()
        counts.update(dict(zip(map(str, tar.labels), of_tar, strict=True)))
    return counts


def _named(listing: TarListing, folder: Path, free_numbers: Mapping[str, int]) -> list[ForeignTar]:
    """Return the tars that have samples; those elsewhere get names for links in the folder."""
    parents = {tar.path.parent.resolve() for tar in listing.tars}
    keep_names = bool(listing.url) or parents == {folder.resolve()}
    counts, tars = Counter(free_numbers), list[ForeignTar]()
    for tar in listing.tars:
        name = tar.name if keep_names else shard_name(listing.dataset, tar.split, counts[tar.split])
        counts[tar.split] += 1
        if len(tar.rows):
            tars.append(replace(tar, name=name))
        else:
            say(f"{tar.name}: no samples in it: left out")
    return tars


def _parts(tars: Sequence[ForeignTar], numbers: Mapping[Label, int]) -> Iterator[SplitRows]:
    """Yield shards and rows of each split; `numbers` are those of the classes."""
    by_split = defaultdict[str, list[ForeignTar]](list)
    for tar in tars:
        by_split[tar.split].append(tar)
    for split, of_split in by_split.items():
        rows = np.concatenate([tar.rows for tar in of_split])
        rows["shard"] = np.repeat(range(len(of_split)), [len(tar.rows) for tar in of_split])
        of_class = [np.array([numbers[each] for each in tar.labels]) for tar in of_split]
        rows["label"] = np.concatenate(
            [table[tar.rows["label"]] for table, tar in zip(of_class, of_split, strict=True)]
        )
        shards = [Shard(tar.name, len(tar.rows), tar.size, tar.sha256) for tar in of_split]
        yield SplitRows(split, shards, rows)


def _link(tars: Sequence[ForeignTar], folder: Path) -> None:
    """Make links in a folder to the tars of this machine that do not lie there."""
    for tar in tars:
        path = folder.resolve() / tar.name
        if path == tar.path.parent.resolve() / tar.path.name:
            continue
        with translated_os_errors(path):
            if path.is_symlink():
                path.unlink()
            path.symlink_to(tar.path.resolve())
