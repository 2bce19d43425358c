"""More tars of other programs for a folder of such tars: they are indexed, and no byte is copied.

    tars -> those that no version lists -> each read once -> copies, leaks -> next version

Tars that lie elsewhere get links. Whole tars are added, so none may hold a sample that is there.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from convert.indexing.split_index import (
    Splits,
    by_split,
    hold_out,
    link,
    refuse_duplicates,
    rows_of,
)
from convert.indexing.tar_index import TarIndex, index_tars
from convert.indexing.tar_listing import TarListing, list_tars
from convert.options import Packing
from convert.packing.pack import write_version
from convert.packing.plan import PlannedShard, ShardPlan, make_plan
from convert.packing.shard_result import ShardResult
from convert.packing.stored_samples import keys_of
from convert.readers.records import RecordListing
from convert.readers.tars import Tar
from convert.readers.webdataset_tars import Label, label_member, samples_in
from convert.versions.parent import Parent
from rackrun.commands import called
from rackrun.errors import DataError
from rackrun.terminal import clean, say
from rackrun.units import plural

ADOPTED = "adopted"  # what has become of samples, in the manifest of their version
LOOKED_AT = 100  # samples of a tar whose layout is sought


def holds_tars(source: Path) -> bool:
    """Return True for a tar in WebDataset's layout, and for a folder with tars in it."""
    if source.is_dir():
        return any(next(source.glob(pattern), None) for pattern in ("*.tar", "*/*.tar"))
    with suppress(DataError, OSError):
        if source.suffix == ".tar":
            return any(map(label_member, islice(samples_in(Tar(source)), LOOKED_AT)))
    return False


@dataclass(frozen=True)
class TarAppend:
    """Tars to add to a folder of such tars."""

    parent: Parent
    source: Path
    split: str
    label_field: str
    allow: tuple[Literal["leaks", "similar-classes", "dropped"], ...]

    def run(self, packing: Packing) -> None:
        """Make the next version."""
        parent, target = self.parent, self.parent.target
        listing = self._listing()
        indexed = index_tars(listing, target.folder, self.label_field, packing.processes)
        listing, indexed = self._without_copies(listing, indexed)
        if not listing.tars:
            say(f"{target.folder}: nothing to add; the newest version is {parent.manifest.number}")
            return
        if packing.val_percent:
            listing = hold_out(listing, indexed, packing.val_percent)
        refuse_duplicates(listing, indexed)
        self._refuse_stored_keys(listing, indexed, packing.processes)
        starts = parent.starts()
        free = {split: start.number for split, start in starts.items()}
        splits = by_split(listing, indexed, target.folder, free)
        classes, numbers = _grown_classes(parent.manifest.classes, indexed)
        dataset = parent.manifest.dataset
        nothing = RecordListing(dataset, classes, (), iter(()))
        plan = parent.planned(make_plan(nothing, packing, starts)[0])
        first = {split: start.position for split, start in starts.items()}
        contents = [tar.contents for split in sorted(splits) for tar in splits[split]]
        plan = replace(
            plan,
            indexed=True,
            shards=tuple(_shards(splits, first)),
            lines_sha256=sha256("".join(each.sha256 for each in contents).encode()).hexdigest(),
            change={ADOPTED: sum(each.samples for each in contents)},
        )
        write = partial(self._link, plan, splits, numbers)
        write_version(target, plan, [], packing, parent.source, write)
        parent.say_added(plan)

    def _link(self, plan: ShardPlan, splits: Splits, numbers: Mapping[Label, int]) -> None:
        """Make links to the tars that lie elsewhere, and write the result of each."""
        target = self.parent.target
        link(splits, target.folder)
        tars = chain.from_iterable(splits[split] for split in sorted(splits))
        for shard, tar in zip(plan.shards, tars, strict=True):
            rows = rows_of([tar], numbers, shard.number)
            ShardResult(tar.shard, rows, tar.contents.findings).save(target.done(shard.name), plan)

    def _listing(self) -> TarListing:
        """List the tars that no version lists."""
        folder = self.parent.target.folder
        listed = {(folder / each.shard.name).resolve() for _, each, _ in self.parent.stored()}
        command = f"{called('convert')} append {shlex.join(map(str, (self.source, folder)))}"
        dataset = self.parent.manifest.dataset
        listing = list_tars((str(self.source),), self.split, dataset, command)
        return self._kept(listing, [tar.path.resolve() not in listed for tar in listing.tars])

    def _without_copies(
        self, listing: TarListing, indexed: Sequence[TarIndex]
    ) -> tuple[TarListing, list[TarIndex]]:
        """Return what is left without the tars whose bytes the newest version has."""
        splits = self.parent.manifest.splits
        stored = {shard.sha256 for split in splits for shard in split.shards}
        stays = [contents.sha256 not in stored for contents in indexed]
        left = [contents for contents, keep in zip(indexed, stays, strict=True) if keep]
        return self._kept(listing, stays), left

    def _kept(self, listing: TarListing, stays: Sequence[bool]) -> TarListing:
        if not all(stays):
            count = plural(len(stays) - sum(stays), "tar")
            say(f"{self.parent.target.folder}: {count}: a version has them already")
        tars = tuple(tar for tar, keep in zip(listing.tars, stays, strict=True) if keep)
        return replace(listing, tars=tars)

    def _refuse_stored_keys(
        self, listing: TarListing, indexed: Sequence[TarIndex], workers: int
    ) -> None:
        """Raise DataError for a key that a version has in the same split."""
        stored = list(self.parent.stored())
        keys = keys_of([(source, each) for source, each, _ in stored], workers)
        current, dropped = dict[tuple[str, str], str](), dict[tuple[str, str], str]()
        for _, each, is_newest in stored:
            name, shards = each.shard.name, current if is_newest else dropped
            shards |= {(each.split, key): name for key in keys[name].keys}
        for tar, contents in zip(listing.tars, indexed, strict=True):
            for key in contents.keys.values():
                where = clean(f"{tar.path}: {key}")
                if shard := current.get((tar.split, key)):
                    raise DataError(
                        f"{where}: {shard} has a sample of that key, and tars are added whole; "
                        "write the tar again without it, or with another key"
                    )
                if (tar.split, key) in dropped and "dropped" not in self.allow:
                    raise DataError(
                        f"{where}: was dropped by an earlier version; to take such samples again, "
                        "add --allow dropped"
                    )


def _shards(splits: Splits, first: Mapping[str, int]) -> Iterator[PlannedShard]:
    """Yield the tars as shards of a plan; `first` has the position of the first, by split."""
    for split in sorted(splits):
        for number, tar in enumerate(splits[split], first.get(split, 0)):
            yield PlannedShard(tar.name, split, number, _images(tar.contents), 0, 0)


def _images(contents: TarIndex) -> int:
    """Return how many samples there are, those that cannot be used included."""
    return contents.samples + sum(finding.is_loss for finding in contents.findings)


def _grown_classes(
    classes: tuple[str, ...], indexed: Sequence[TarIndex]
) -> tuple[tuple[str, ...], dict[Label, int]]:
    """Return the class table with new ones at its end, and the number of each label in it.

    DataError for a number beyond a table of names, and for names where classes are numbers.
    """
    labels = set[Label]().union(*(each.labels for each in indexed))
    counted = tuple(map(str, range(len(classes))))
    texts = sorted(label for label in labels if isinstance(label, str))
    count = max((label + 1 for label in labels if isinstance(label, int)), default=0)
    if texts and classes == counted:
        raise DataError(f"the classes here are numbers, and {texts[0]!r} of a sample is a name")
    if count > len(classes) and classes != counted:
        raise DataError(
            f"a sample has class {count - 1}, and there are {plural(len(classes), 'name')}; to name"
            " more, index all tars again with --classes FILE --force"
        )
    more = map(str, range(len(classes), count)) if classes == counted else texts
    table = tuple(dict.fromkeys((*classes, *more)))
    numbers: dict[Label, int] = {name: number for number, name in enumerate(table)}
    return table, numbers | {number: number for number in range(len(table))}
