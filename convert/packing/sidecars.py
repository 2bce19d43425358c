"""Files for other readers, beside the shards of a finished folder."""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

from convert.packing.output_folder import Target
from convert.packing.sidecar_formats import (
    ENERGON_BYTES,
    META,
    dali_index,
    energon_files,
    energon_index,
    samples_of,
    sidecar_names,
    wids_list,
)
from convert.packing.workers import in_parallel, working_on
from convert.progress import Progress, meter
from convert.readers.records import open_archive
from convert.readers.tars import Tar
from rackrun.atomic import translated_os_errors, write_whole
from rackrun.commandline.options import Examples, Positional
from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import UsageError
from rackrun.machine import core_count
from shards.index import Manifest


@dataclass(frozen=True)
class Sidecars:
    """Write index files for other programs: DALI's .idx, wids' JSON, Energon's .nv-meta."""

    examples: ClassVar[Examples] = (("{prog} data/shards", "for DALI, wids and Energon"),)

    folder: Positional[Path]
    """Finished shard folder."""
    workers: int = 0
    """Number of processes; 0: one per core."""

    def run(self) -> None:
        """Write them from the headers of the tars; the shards stay as they are."""
        if self.workers < 0:
            raise UsageError("--workers cannot be negative")
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder}: there is no such folder")
        with Target(self.folder).locked():
            write_sidecars(self.folder, self.workers or core_count())


class IndexedShard(NamedTuple):
    """A tar whose indexes have been written."""

    name: str
    samples: int


def write_sidecars(folder: Path, workers: int, only_missing: bool = False) -> None:
    """Write them, from the headers of the tars; then list them in the manifest.

    `only_missing`: leave out tars that have theirs, as those of an earlier version. UsageError if
    files of such names are there that are not ours.
    """
    manifest = _manifest(folder)
    if manifest.tars:
        raise UsageError(f"{folder}: its tars lie on a server; type this on it, in their folder")
    if not manifest.sidecars:
        _refuse_foreign(folder, manifest)
        write_whole(folder / MANIFEST_NAME, replace(manifest, sidecars=True).serialise())
    tars = [folder / shard.name for split in manifest.splits for shard in split.shards]
    counts = {}
    if only_missing:
        counts = {tar.name: count for tar in tars if (count := _samples_indexed(tar))}
        tars = [tar for tar in tars if tar.name not in counts]
    steps = in_parallel(tars, _index, workers)
    with closing(steps), meter("indexed", len(tars), "tars") as shown:
        for tar in steps:
            counts[tar.name] = tar.samples
            shown.advance(Progress(1, 0))
    shards = [shard.name for split in manifest.splits for shard in split.shards]
    files = energon_files(manifest, {name: counts[name] for name in shards})
    files |= {
        f"{manifest.dataset}-{split.name}.wids.json": wids_list(manifest.dataset, split)
        for split in manifest.splits
    }
    with translated_os_errors(folder / META):
        (folder / META).mkdir(exist_ok=True)
    for name, data in files.items():
        write_whole(folder / name, data)


def _samples_indexed(tar: Path) -> int:
    """Return how many samples the indexes beside a tar list; 0 if one of them is missing."""
    energon = _energon_path(tar)
    both = energon.exists() and tar.with_suffix(".idx").exists()
    return energon.stat().st_size // ENERGON_BYTES - 1 if both else 0


def _energon_path(tar: Path) -> Path:
    return tar.with_name(f"{tar.name}.idx")


def _index(tar: Path, report: Callable[[IndexedShard], None]) -> None:
    working_on(str(tar))
    with os.fdopen(open_archive(tar), "rb") as file:
        samples = samples_of(Tar(tar, file.fileno()))
    write_whole(tar.with_suffix(".idx"), dali_index(samples))
    write_whole(_energon_path(tar), energon_index(samples))
    report(IndexedShard(tar.name, len(samples)))


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    try:
        return Manifest.parse(path.read_bytes(), str(path))
    except OSError:
        raise UsageError(f"{folder}: not a finished shard folder; convert it first") from None


def _refuse_foreign(folder: Path, manifest: Manifest) -> None:
    for name in sorted(sidecar_names(manifest)):
        if os.path.lexists(folder / name):
            raise UsageError(f"{folder / name}: no conversion has made it; move it elsewhere")
