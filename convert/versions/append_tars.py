"""More tars of other programs for a folder of such tars: they are indexed, and no byte is copied.

    tars -> those that no version lists -> each read once -> copies, leaks -> next version

Tars that lie elsewhere get links. Whole tars are added, so none may hold a sample that is there.
"""

import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME
from rackrun.convert.indexing.split_index import (
    hold_out,
    link,
    named_tars,
    parts_of,
    refuse_duplicates,
    refuse_losses,
)
from rackrun.convert.indexing.tar_index import TarIndex, index_tars
from rackrun.convert.indexing.tar_listing import TarListing, list_tars
from rackrun.convert.options import Packing
from rackrun.convert.packing.copies import leaks_refused
from rackrun.convert.packing.quality_report import report_lines
from rackrun.convert.packing.stored_samples import StoredShard, shards_of
from rackrun.convert.readers.tars import Tar
from rackrun.convert.readers.webdataset_tars import Label, label_member, samples_in
from rackrun.convert.versions.version import NewestVersion
from rackrun.errors import DataError, UsageError
from rackrun.terminal import clean, say
from rackrun.units import plural

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
    newest: NewestVersion,
    source: Path,
    split: str,
    label_field: str,
    packing: Packing,
    takes_dropped: bool,
    command: Sequence[str],
) -> None:
    """Make the next version of a folder of other programs' tars, with more of them.

    `split`: of all tars, empty: by their names. `takes_dropped`: also samples that an earlier
    version has dropped. UsageError where the folder has images that were converted.
    """
    folder, manifest = newest.target.folder, newest.manifest
    listing = _unlisted(newest, source, split)
    indexed = index_tars(listing, folder, label_field, packing.processes)
    # A tar under another name whose bytes the newest version has.
    stored = {shard.sha256 for split in manifest.splits for shard in split.shards}
    is_new = [contents.sha256 not in stored for contents in indexed]
    indexed = [contents for contents, keep in zip(indexed, is_new, strict=True) if keep]
    listing = _kept(newest, listing, is_new)
    if not listing.tars:
        say(f"{folder}: nothing to add; the newest version is {manifest.number}")
        return
    if packing.val_percent:
        listing = hold_out(listing, indexed, packing.val_percent)
    refuse_duplicates(listing, indexed)
    _refuse_stored_keys(newest, listing, indexed, takes_dropped)
    findings = [finding for each in indexed for finding in each.findings]
    samples = sum(len(each.rows) for each in indexed)
    advice = "if they are to be left out, add"
    refuse_losses(folder, findings, samples, packing.allow_left_out, advice)
    tars = named_tars(listing, indexed, folder, newest.free_numbers())
    classes, numbers = _grown_classes(manifest.classes, indexed)
    link(tars, folder)
    parts = newest.joined(parts_of(tars, numbers))
    findings += newest.new_copies(parts, classes, lambda shard, key: f"{shard.name}/{key}")
    if "leaks" not in packing.allow and (leaks := leaks_refused(findings)):
        raise DataError(f"{folder}: {leaks}; take them out of the source, or add --allow leaks")
    for line in report_lines(findings):
        say(line.strip())
    newest.publish(parts, {"adopted": samples}, command, classes=classes)


def _unlisted(newest: NewestVersion, source: Path, split: str) -> TarListing:
    """Return the tars of a source that no version lists."""
    folder, typed = newest.target.folder, shlex.quote(str(source))
    if not newest.manifest.adopted:
        if (source / MANIFEST_NAME).exists():
            raise UsageError(
                f"{source}: a folder of shards; append the images that it was made from, or "
                "train on both with --data A --data B"
            )
        raise UsageError(
            f"{source}: tars of samples, and {folder} was converted from images; index them on"
            f" their own: {called('convert')} index {typed} --out FOLDER, and train on both with"
            " --data A --data B"
        )
    stored = chain(shards_of(newest.source), newest.earlier_shards())
    listed = {(folder / each.shard.name).resolve() for each in stored}
    command = f"{called('convert')} append {shlex.join(map(str, (source, folder)))}"
    listing = list_tars((str(source),), split, newest.manifest.dataset, command)
    return _kept(newest, listing, [tar.path.resolve() not in listed for tar in listing.tars])


def _kept(newest: NewestVersion, listing: TarListing, is_new: Sequence[bool]) -> TarListing:
    if not all(is_new):
        count = plural(len(is_new) - sum(is_new), "tar")
        say(f"{newest.target.folder}: {count}: already in a version")
    tars = tuple(tar for tar, keep in zip(listing.tars, is_new, strict=True) if keep)
    return replace(listing, tars=tars)


def _refuse_stored_keys(
    newest: NewestVersion,
    listing: TarListing,
    indexed: Sequence[TarIndex],
    takes_dropped: bool,
) -> None:
    current, dropped = _by_key(shards_of(newest.source)), _by_key(newest.earlier_shards())
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
                    f"{where}: was dropped by an earlier version; to add such samples again, "
                    "add --allow dropped"
                )


def _by_key(shards: Iterable[StoredShard]) -> dict[tuple[str, str], str]:
    return {(each.split, key): each.shard.name for each in shards for key in each.sample_keys()}


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
