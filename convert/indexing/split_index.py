"""The splits of indexed tars: the names by which tars are read, and the rows of their images."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rackrun.atomic import translated_os_errors
from rackrun.convert.indexing.tar_index import TarIndex
from rackrun.convert.indexing.tar_listing import TarListing
from rackrun.convert.packing.copies import SplitRows
from rackrun.convert.packing.finalize import may_be_lost
from rackrun.convert.readers.records import TRAIN, VAL, ImageDefect
from rackrun.convert.readers.webdataset_tars import Label
from rackrun.errors import DataError, UsageError
from rackrun.shards.index import Shard, shard_name
from rackrun.terminal import clean, say
from rackrun.units import plural


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


def refuse_duplicates(listing: TarListing, indexed: Sequence[TarIndex]) -> None:
    """Raise DataError for a key that two tars of one split have."""
    paths: dict[tuple[str, bytes], Path] = {}
    for tar, contents in zip(listing.tars, indexed, strict=True):
        for mark, key in contents.keys.items():
            earlier = paths.setdefault((tar.split, mark), tar.path)
            if earlier != tar.path:
                raise DataError(
                    clean(f"{tar.path}: {key}: is in {earlier}, too; leave one of them out")
                )


def refuse_losses(
    folder: Path, findings: Sequence[ImageDefect], stored: int, allowed: int | None, advice: str
) -> None:
    """Raise DataError if more images are left out than may be; `advice` leads to the option."""
    lost = sum(finding.is_loss for finding in findings)
    limit = may_be_lost(stored + lost) if allowed is None else allowed
    if lost > limit:
        raise DataError(
            f"{folder}: {lost:,} of {stored + lost:,} images cannot be used, and {limit:,} may be "
            f"missing; {advice} --allow-left-out {lost}"
        )


def named_tars(
    listing: TarListing,
    indexed: Sequence[TarIndex],
    folder: Path,
    numbers: Mapping[str, int] | None = None,
) -> list[IndexedTar]:
    """Return the tars that have samples, in order.

    Tars elsewhere than in the folder get names for links there; `numbers` has, by split, the first
    one that is free.
    """
    parents = {tar.path.parent.resolve() for tar in listing.tars}
    keep_names = bool(listing.url) or parents == {folder.resolve()}
    counts, tars = Counter(numbers or {}), list[IndexedTar]()
    for tar, contents in zip(listing.tars, indexed, strict=True):
        name = tar.name if keep_names else shard_name(listing.dataset, tar.split, counts[tar.split])
        counts[tar.split] += 1
        if len(contents.rows):
            tars.append(IndexedTar(tar.path, name, tar.split, contents))
        else:
            say(f"{tar.name}: no samples in it: left out")
    return tars


def parts_of(tars: Sequence[IndexedTar], numbers: Mapping[Label, int]) -> list[SplitRows]:
    """Return shards and rows of each split; `numbers` are those of the classes."""
    by_split = defaultdict[str, list[IndexedTar]](list)
    for tar in tars:
        by_split[tar.split].append(tar)
    parts = []
    for split, of_split in sorted(by_split.items()):
        shards, tables = [], []
        for number, (_, name, _, contents) in enumerate(of_split):
            rows = contents.rows.copy()
            rows["shard"] = number
            rows["label"] = np.array([numbers[each] for each in contents.labels])[rows["label"]]
            tables.append(rows)
            shards.append(Shard(name, len(rows), contents.size, contents.sha256))
        parts.append(SplitRows(split, shards, np.concatenate(tables)))
    return parts


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
