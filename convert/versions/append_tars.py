"""More tars of other programs for a folder of such tars: they are indexed, and no byte is copied.

    tars -> those that no version lists -> each read once -> copies, leaks -> next version

Tars that lie elsewhere get links. Whole tars are added, so none may hold a sample that is there.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path

from rackrun.commands import called
from rackrun.convert.indexing.split_index import (
    Splits,
    by_split,
    hold_out,
    link,
    refuse_duplicates,
    rows_of,
)
from rackrun.convert.indexing.tar_index import TarIndex, index_tars
from rackrun.convert.indexing.tar_listing import TarListing, list_tars
from rackrun.convert.options import Packing
from rackrun.convert.packing.output_folder import ShardResult
from rackrun.convert.packing.pack import write_version
from rackrun.convert.packing.plan import PlannedShard, ShardPlan, Start, make_plan
from rackrun.convert.packing.stored_samples import keys_of
from rackrun.convert.readers.records import RecordListing
from rackrun.convert.readers.tars import Tar
from rackrun.convert.readers.webdataset_tars import Label, label_member, samples_in
from rackrun.convert.versions.parent import Parent
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


def append_tars(
    parent: Parent,
    source: Path,
    split: str,
    label_field: str,
    packing: Packing,
    takes_dropped: bool,
) -> None:
    """Make the next version of a folder of other programs' tars, with those of `source`.

    `split`: that of all these tars; empty to take it from their names. `takes_dropped`: also take
    samples that an earlier version has dropped.
    """
    target, manifest = parent.target, parent.manifest
    listing = _listing(parent, source, split)
    indexed = index_tars(listing, target.folder, label_field, packing.processes)
    # A tar under another name whose bytes the newest version has.
    stored = {shard.sha256 for split in manifest.splits for shard in split.shards}
    is_new = [contents.sha256 not in stored for contents in indexed]
    indexed = [contents for contents, keep in zip(indexed, is_new, strict=True) if keep]
    listing = _kept(parent, listing, is_new)
    if not listing.tars:
        say(f"{target.folder}: nothing to add; the newest version is {manifest.number}")
        return
    if packing.val_percent:
        listing = hold_out(listing, indexed, packing.val_percent)
    refuse_duplicates(listing, indexed)
    _refuse_stored_keys(parent, listing, indexed, packing.processes, takes_dropped)
    starts = parent.starts()
    splits = by_split(
        listing, indexed, target.folder, {name: start.number for name, start in starts.items()}
    )
    classes, numbers = _grown_classes(manifest.classes, indexed)
    nothing = RecordListing(manifest.dataset, classes, (), iter(()))
    contents = [tar.contents for tar in chain.from_iterable(splits.values())]
    plan = replace(
        parent.planned(make_plan(nothing, packing, starts)[0]),
        indexed=True,
        shards=tuple(_planned(splits, starts)),
        lines_sha256=sha256("".join(each.sha256 for each in contents).encode()).hexdigest(),
        change={ADOPTED: sum(each.samples for each in contents)},
    )
    write = partial(_link, parent, plan, splits, numbers)
    write_version(target, plan, [], packing, parent.source, write)
    parent.say_added(plan)


def _listing(parent: Parent, source: Path, split: str) -> TarListing:
    folder = parent.target.folder
    listed = {(folder / stored.shard.name).resolve() for stored, _ in parent.stored()}
    command = f"{called('convert')} append {shlex.join(map(str, (source, folder)))}"
    listing = list_tars((str(source),), split, parent.manifest.dataset, command)
    return _kept(parent, listing, [tar.path.resolve() not in listed for tar in listing.tars])


def _kept(parent: Parent, listing: TarListing, is_new: Sequence[bool]) -> TarListing:
    if not all(is_new):
        count = plural(len(is_new) - sum(is_new), "tar")
        say(f"{parent.target.folder}: {count}: a version has them already")
    tars = tuple(tar for tar, keep in zip(listing.tars, is_new, strict=True) if keep)
    return replace(listing, tars=tars)


def _planned(splits: Splits, starts: Mapping[str, Start]) -> Iterator[PlannedShard]:
    for name, tars in splits.items():
        for position, tar in enumerate(tars, starts[name].position):
            # Those that cannot be used are images of the plan, too: they count as losses.
            lost = sum(finding.is_loss for finding in tar.contents.findings)
            yield PlannedShard(tar.name, name, position, tar.contents.samples + lost, 0, 0)


def _link(parent: Parent, plan: ShardPlan, splits: Splits, numbers: Mapping[Label, int]) -> None:
    link(splits, parent.target.folder)
    for shard, tar in zip(plan.shards, chain.from_iterable(splits.values()), strict=True):
        rows = rows_of([tar], numbers, shard.number)
        parent.target.save_result(plan, ShardResult(tar.shard, rows, tar.contents.findings))


def _refuse_stored_keys(
    parent: Parent,
    listing: TarListing,
    indexed: Sequence[TarIndex],
    workers: int,
    takes_dropped: bool,
) -> None:
    is_newest = dict(parent.stored())
    current, dropped = dict[tuple[str, str], str](), dict[tuple[str, str], str]()
    for stored, keys in keys_of(list(is_newest), workers).items():
        shards = current if is_newest[stored] else dropped
        shards |= {(stored.split, key): stored.shard.name for key in keys}
    for tar, contents in zip(listing.tars, indexed, strict=True):
        for key in contents.keys.values():
            where = clean(f"{tar.path}: {key}")
            if shard := current.get((tar.split, key)):
                raise DataError(
                    f"{where}: {shard} has a sample of that key, and tars are added whole; "
                    "write the tar again without it, or with another key"
                )
            if (tar.split, key) in dropped and not takes_dropped:
                raise DataError(
                    f"{where}: was dropped by an earlier version; to take such samples again, "
                    "add --allow dropped"
                )


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
