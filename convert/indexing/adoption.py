"""Tars of other programs become shards: the split, the name, the classes and the rows of each."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import numpy as np

from rackrun.atomic import translated_os_errors
from rackrun.convert.indexing.tar_index import ForeignTar
from rackrun.convert.packing.copies import SplitRows
from rackrun.convert.readers.records import TRAIN, VAL
from rackrun.convert.readers.webdataset_tars import Label
from rackrun.errors import DataError, UsageError
from rackrun.shards.index import Shard, shard_name
from rackrun.terminal import say
from rackrun.units import plural


def held_out(tars: Sequence[ForeignTar], percent: float) -> list[ForeignTar]:
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
    return [replace(tar, split=VAL) if tar.path in drawn else tar for tar in tars]


def class_counts(tars: Sequence[ForeignTar]) -> Counter[str]:
    """Return the number of samples of each label."""
    counts = Counter[str]()
    for tar in tars:
        of_tar = np.bincount(tar.rows["label"], minlength=len(tar.labels)).tolist()
        counts.update(dict(zip(map(str, tar.labels), of_tar, strict=True)))
    return counts


def named(tars: Sequence[ForeignTar], folder: Path, dataset: str) -> list[ForeignTar]:
    """Return the tars that have samples; those elsewhere get names for links in the folder."""
    keep_names = {tar.path.parent.resolve() for tar in tars} == {folder.resolve()}
    numbers, with_samples = Counter[str](), list[ForeignTar]()
    for tar in tars:
        name = tar.name if keep_names else shard_name(dataset, tar.split, numbers[tar.split])
        numbers[tar.split] += 1
        if len(tar.rows):
            with_samples.append(replace(tar, name=name))
        else:
            say(f"{tar.name}: no samples in it: left out")
    return with_samples


def splits_of(tars: Sequence[ForeignTar], numbers: Mapping[Label, int]) -> list[SplitRows]:
    """Return shards and rows of each split; `numbers` are those of the classes."""
    splits = list[SplitRows]()
    by_split = defaultdict[str, list[ForeignTar]](list)
    for tar in tars:
        by_split[tar.split].append(tar)
    for split, of_split in sorted(by_split.items()):
        rows = np.concatenate([tar.rows for tar in of_split])
        rows["shard"] = np.repeat(range(len(of_split)), [len(tar.rows) for tar in of_split])
        of_class = [np.array([numbers[each] for each in tar.labels]) for tar in of_split]
        rows["label"] = np.concatenate(
            [table[tar.rows["label"]] for table, tar in zip(of_class, of_split, strict=True)]
        )
        shards = [Shard(tar.name, len(tar.rows), tar.size, tar.sha256) for tar in of_split]
        splits.append(SplitRows(split, shards, rows))
    return splits


def link(tars: Sequence[ForeignTar], folder: Path) -> None:
    """Make links in a folder to the tars of this machine that do not lie there."""
    for tar in tars:
        path = folder.resolve() / tar.name
        if path == tar.path.parent.resolve() / tar.path.name:
            continue
        with translated_os_errors(path):
            if path.is_symlink():
                path.unlink()
            path.symlink_to(tar.path.resolve())
