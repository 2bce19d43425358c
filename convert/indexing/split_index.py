"""The splits of indexed tars: the names by which the tars are read, rows, copies of images."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

from rackrun.atomic import translated_os_errors
from rackrun.convert.indexing.tar_index import TarIndex
from rackrun.convert.indexing.tar_listing import TarListing
from rackrun.convert.packing.copies import SplitRows, copies, local_files
from rackrun.convert.packing.plan import TRAIN, VAL
from rackrun.convert.readers.records import ImageDefect
from rackrun.convert.readers.webdataset_tars import Label
from rackrun.errors import DataError, UsageError
from rackrun.shards.index import INDEX_FIELDS, PACKED_ROW, Row, Shard, pack_rows, shard_name
from rackrun.terminal import clean, say
from rackrun.units import plural


class IndexedTar(NamedTuple):
    """A tar of a split: where it lies, the name by which it is read, and what is in it."""

    path: Path
    name: str
    contents: TarIndex

    @property
    def shard(self) -> Shard:
        """Its entry of the manifest."""
        return Shard(self.name, self.contents.samples, self.contents.size, self.contents.sha256)


Splits = Mapping[str, Sequence[IndexedTar]]


def hold_out(listing: TarListing, indexed: Sequence[TarIndex], percent: float) -> TarListing:
    """Return the listing with some tars of train as val, drawn by their names and nothing else.

    Whole tars, because the rows of an index cover a tar without a gap: thus every byte is verified.
    """
    contents = dict(zip(listing.tars, indexed, strict=True))
    train = [tar for tar in listing.tars if tar.split == TRAIN and contents[tar].samples]
    if any(tar.split == VAL for tar in listing.tars):
        raise UsageError("--val-percent: the tars have a split val; leave the option out")
    if len(train) < 2:
        raise UsageError(
            f"--val-percent holds out whole tars, and {plural(len(train), 'tar')} of train has "
            "samples; give more tars, or leave the option out"
        )
    train.sort(key=lambda tar: sha256(f"{VAL}:{tar.name}".encode()).digest())
    samples = [contents[tar].samples for tar in train]
    totals = list(accumulate(samples))
    enough = next(n for n, total in enumerate(totals, 1) if total >= totals[-1] * percent / 100)
    enough = min(enough, len(train) - 1)
    val, rest = train[:enough], train[enough:]
    remaining = set[Label]().union(*(contents[tar].labels for tar in rest))
    for tar in val:
        if missing := sorted(map(str, set(contents[tar].labels) - remaining)):
            raise DataError(
                f"{tar.path}: would be held out as val, and no tar that stays in train has class "
                f"{missing[0]}; shuffle the samples over the tars, or leave out --val-percent"
            )
    say(
        f"{len(val)} of {plural(len(train), 'tar')} with {totals[enough - 1]:,} of "
        f"{plural(totals[-1], 'image')} are held out as val"
    )
    held_out = set(val)
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


def by_split(
    listing: TarListing,
    indexed: Sequence[TarIndex],
    folder: Path,
    numbers: Mapping[str, int] | None = None,
) -> Splits:
    """Return the tars of each split that have samples, in order.

    `numbers` has, by split, the first one that is free for the name of a link.
    """
    splits: dict[str, list[IndexedTar]] = {}
    names = _names(listing, folder, numbers or {})
    for tar, name, index in zip(listing.tars, names, indexed, strict=True):
        if index.samples:
            splits.setdefault(tar.split, []).append(IndexedTar(tar.path, name, index))
        else:
            say(f"{tar.name}: no samples in it: left out")
    return dict(sorted(splits.items()))


def rows_of(tars: Sequence[IndexedTar], numbers: Mapping[int | str, int], first: int = 0) -> bytes:
    """Return the rows of the index of a split, the numbers of its tars counted from `first`.

    `numbers` are those of the classes.
    """
    return pack_rows(
        row._replace(shard=number, label=numbers[tar.contents.labels[row.label]])
        for number, tar in enumerate(tars, first)
        for row in map(Row._make, PACKED_ROW.iter_unpack(tar.contents.rows))
    )


def copies_in(
    splits: Splits, rows: Mapping[str, bytes], classes: Sequence[str], url: str
) -> Iterator[ImageDefect]:
    """Yield the exact copies among the images of tars of this machine, or of those at a URL."""
    import numpy as np

    paths = {tar.name: tar.path for tar in chain.from_iterable(splits.values())}
    read = local_files(paths.__getitem__)
    if url:
        from rackrun.shards.http_source import HttpSource

        read = HttpSource(url).read
    parts = [
        SplitRows(split, [tar.shard for tar in tars], np.frombuffer(rows[split], INDEX_FIELDS))
        for split, tars in splits.items()
    ]
    return copies(parts, classes, read)


def link(splits: Splits, folder: Path) -> None:
    """Make links in a folder to the tars of this machine that do not lie there."""
    for tar in chain.from_iterable(splits.values()):
        path = folder.resolve() / tar.name
        if path == tar.path.parent.resolve() / tar.path.name:
            continue
        with translated_os_errors(path):
            if path.is_symlink():
                path.unlink()
            path.symlink_to(tar.path.resolve())


def _names(listing: TarListing, folder: Path, numbers: Mapping[str, int]) -> list[str]:
    if listing.url or all(tar.path.parent.resolve() == folder.resolve() for tar in listing.tars):
        return [tar.name for tar in listing.tars]
    counts = Counter(numbers)
    names = []
    for tar in listing.tars:
        names.append(shard_name(listing.dataset, tar.split, counts[tar.split]))
        counts[tar.split] += 1
    return names
