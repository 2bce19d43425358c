"""More tars of other programs for a folder of such tars: they are indexed, and no byte is copied.

    tars -> those that no version lists -> each read once -> copies, leaks -> next version

Tars that lie elsewhere get links. Whole tars are added, so none may hold a sample that is there.
"""

import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME
from rackrun.convert.indexing.adoption import adopt
from rackrun.convert.indexing.tar_index import ForeignTar, read_tars, refuse_duplicates
from rackrun.convert.indexing.tar_listing import TarListing, list_tars
from rackrun.convert.options import Packing
from rackrun.convert.packing.stored_samples import StoredShard, shards_of
from rackrun.convert.readers.tars import Tar
from rackrun.convert.readers.webdataset_tars import label_member, samples_in
from rackrun.convert.versions.version import NewestVersion
from rackrun.errors import DataError, UsageError
from rackrun.terminal import say
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
    tars = read_tars(listing.tars, "", folder, label_field, packing.processes)
    # A tar under another name whose bytes the newest version has.
    stored = {shard.sha256 for split in manifest.splits for shard in split.shards}
    listing = _kept(
        newest, replace(listing, tars=tuple(tars)), lambda tar: tar.sha256 not in stored
    )
    if not listing.tars:
        say(f"{folder}: nothing to add; the newest version is {manifest.number}")
        return
    dropped = () if takes_dropped else _by_key(newest.earlier_shards())
    refuse_duplicates(listing.tars, _by_key(shards_of(newest.source)), dropped)
    parts, classes, findings = adopt(
        listing,
        folder,
        packing,
        version=manifest.number + 1,
        before=newest.parts(),
        classes=manifest.classes,
        free_numbers=newest.free_numbers(),
    )
    samples = sum(len(tar.rows) for tar in listing.tars)
    newest.publish(parts, {"adopted": samples}, command, findings, classes=classes)


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
    return _kept(newest, listing, lambda tar: tar.path.resolve() not in listed)


def _kept(
    newest: NewestVersion, listing: TarListing, is_new: Callable[[ForeignTar], bool]
) -> TarListing:
    tars = tuple(filter(is_new, listing.tars))
    if known := len(listing.tars) - len(tars):
        say(f"{newest.target.folder}: {plural(known, 'tar')}: already in a version")
    return replace(listing, tars=tars)


def _by_key(shards: Iterable[StoredShard]) -> dict[tuple[str, str], str]:
    return {(each.split, key): each.shard.name for each in shards for key in each.sample_keys()}
