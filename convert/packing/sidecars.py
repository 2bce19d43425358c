"""Files for other readers, beside the shards of a finished folder."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

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
from convert.packing.workers import ReportProgress, in_parallel, working_on
from convert.progress import Progress
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


def write_sidecars(folder: Path, workers: int, only_missing: bool = False) -> None:
    """Write the sidecars of a folder from the headers of its tars.

    `only_missing`: leave out tars that have theirs, as those of an earlier version. UsageError if
    files with these names exist that no conversion has written.
    """
    path = folder / MANIFEST_NAME
    try:
        manifest = Manifest.parse(path.read_bytes(), str(path))
    except OSError:
        raise UsageError(f"{folder}: not a finished shard folder; convert it first") from None
    if manifest.tars:
        raise UsageError(f"{folder}: its tars lie on a server; type this on it, in their folder")
    if not manifest.sidecars:
        for name in sorted(sidecar_names(manifest)):
            if os.path.lexists(folder / name):
                raise UsageError(f"{folder / name}: no conversion has made it; move it elsewhere")
        # Listed before they are written: what a killed process leaves is known to be ours.
        write_whole(path, replace(manifest, sidecars=True).serialise())
    shards = [shard.name for split in manifest.splits for shard in split.shards]
    counts = dict.fromkeys(shards, 0)
    if only_missing:
        counts = {name: _samples_indexed(folder / name) for name in shards}
    tars = [folder / name for name in shards if not counts[name]]
    written = in_parallel(tars, _index, workers, "indexed", len(tars), "tars")
    counts |= {tar.name: samples for tar, samples in zip(tars, written, strict=True)}
    files = energon_files(manifest, counts)
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


def _index(tar: Path, report: ReportProgress) -> int:
    working_on(str(tar))
    with os.fdopen(open_archive(tar), "rb") as file:
        samples = samples_of(Tar(tar, file.fileno()))
    write_whole(tar.with_suffix(".idx"), dali_index(samples))
    write_whole(_energon_path(tar), energon_index(samples))
    report(Progress(1))
    return len(samples)
