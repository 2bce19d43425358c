"""Reading a whole shard folder again, from disk or over HTTP, to name what is wrong.

Of all its versions: a tar that several versions have is read once, and must have the same rows in
all their indexes. With the source that it was made of, stored images are compared with originals,
which are found by their digests.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

from convert.images.tiles import has_sound_tiles, same_coefficients
from convert.images.transcoder import Refused, library
from convert.packing.copies import SplitRows, copies
from convert.packing.output_folder import Target, shard_files
from convert.packing.quality_report import report_lines
from convert.packing.stored_samples import StoredShard, shards_of
from convert.packing.workers import ReportProgress, in_parallel, working_on
from convert.progress import Progress, meter
from convert.readers.archives import open_images
from convert.readers.records import Container, Defect, Record, is_image
from rackrun.commandline.options import Examples, Positional
from rackrun.errors import DataError, Unavailable, UsageError
from rackrun.machine import core_count
from rackrun.shard_folder import folder_and_version
from rackrun.terminal import clean
from rackrun.units import plural
from shards.images import jpeg_frame
from shards.index import Shard
from shards.open import sources_of
from shards.samples import Sample, sample_of, stored_samples
from shards.source import Source
from shards.tiles import original_digest

SAME_BYTES, SAME_COEFFICIENTS, NO_ORIGINAL = "same_bytes", "same_coefficients", "without_original"
"""How a stored image compares with its original, as --json names the counts."""


@dataclass(frozen=True)
class Verify:
    """Read everything again, and check that shards, indexes and manifest agree in every byte."""

    examples: ClassVar[Examples] = (
        ("{prog} data/shards", "check every byte"),
        ("{prog} http://server:8080/", "of a served folder"),
        ("{prog} data/shards@2", "only version 2"),
    )

    location: Positional[str]
    """Shard folder, or the http(s):// URL of one; all its versions, or one of them: DATA@2."""
    workers: int = 0
    """Processes; 0: one per core."""
    json: bool = False
    """Print JSON: location, versions, samples, shards; faults and copies, lists of sentences; with
    --source also counts of images: same_bytes, same_coefficients, without_original."""
    source: Path | None = None
    """Folder, zip or tar of the originals, to compare bytes with; of images with restart tiles,
    coefficients, and so pixels."""

    def run(self) -> None:
        """Verify; DataError after everything that is wrong has been named."""
        if self.workers < 0:
            raise UsageError("--workers cannot be negative")
        versions = list(sources_of(self.location))
        manifest, originals = versions[0].manifest, None
        if self.source is not None:
            if manifest.tiles:
                library()  # or an error, before anything is read
            originals = Originals.of(self.source)
        jobs, faults = _jobs(versions)
        faults += strangers(versions)
        work = partial(_verify_shard, originals=originals)
        total = sum(stored.shard.samples for stored in jobs)
        counts = Counter[str]()
        workers = self.workers or core_count()
        for shard_counts, shard_faults in in_parallel(jobs, work, workers, "checked", total):
            counts += shard_counts
            faults += shard_faults
        duplicates = list[str]()
        if not faults:
            splits = [
                SplitRows(split.name, split.shards, versions[0].index(split.name))
                for split in manifest.splits
            ]
            duplicates = report_lines([*copies(splits, manifest.classes, versions[0].read)])
        self._print(versions, total, len(jobs), sorted(map(clean, faults)), counts, duplicates)
        if faults:
            raise DataError(
                f"{self.location}: {plural(len(faults), 'fault')}; convert or copy it again"
            )

    def _print(
        self,
        versions: Sequence[Source],
        samples: int,
        shards: int,
        faults: list[str],
        counts: Counter[str],
        duplicates: list[str],
    ) -> None:
        if self.json:
            numbers = [version.manifest.number for version in versions]
            report: dict[str, object] = {"location": self.location, "versions": numbers}
            report |= {"samples": samples, "shards": shards}
            if self.source is not None:
                kinds = (SAME_BYTES, SAME_COEFFICIENTS, NO_ORIGINAL)
                report |= {kind: counts[kind] for kind in kinds}
            report |= {"faults": faults, "copies": [line.strip() for line in duplicates]}
            lines = [json.dumps(report, indent=2)]
        elif faults:
            lines = faults
        else:
            what = f"{plural(samples, 'sample')} in {plural(shards, 'shard')}"
            lines = [f"{self.location}: {what}, all as it should be"]
            lines += [*_chain_lines(self.location, versions), *duplicates]
        if self.source is not None and not self.json:
            lines.append(
                f"{self.source}: {counts[SAME_BYTES]:,} images have the bytes of their originals, "
                f"{counts[SAME_COEFFICIENTS]:,} with restart tiles have their coefficients, "
                f"{counts[NO_ORIGINAL]:,} have no original there"
            )
        sys.stdout.write("".join(f"{line}\n" for line in lines))


def _jobs(versions: Sequence[Source]) -> tuple[list[StoredShard], list[str]]:
    """Return each shard once, as the newest version has it, and the faults of the indexes."""
    import numpy as np

    shards, faults = dict[Shard, StoredShard](), list[str]()
    for source in versions:
        readable = set[str]()
        for split in source.manifest.splits:
            try:
                source.index(split.name)  # read before the fork, so that all workers have it
                readable.add(split.name)
            except Unavailable:
                raise
            except DataError as fault:
                faults.append(str(fault))
        for stored in shards_of(source):
            if stored.split not in readable:
                continue
            newer = shards.setdefault(stored.shard, stored)
            rows = stored.rows.copy()
            rows["shard"] = newer.number  # which may change from one version to the next
            if not np.array_equal(rows, newer.rows):
                faults.append(
                    f"{stored.where}: its rows differ from those in {newer.source.location}"
                )
    return list(shards.values()), faults


def strangers(versions: Sequence[Source]) -> Iterator[str]:
    """Yield shards and indexes in a local folder that no version lists, nor an unfinished one."""
    location, only = folder_and_version(versions[0].location)
    if "://" in location or only:
        return
    folder, dataset = Path(location), versions[0].manifest.dataset
    listed = set[str]().union(*(version.manifest.files() for version in versions))
    listed |= Target(folder).unfinished()
    for name in sorted(shard_files(folder, dataset) - listed):
        yield f"{folder / name}: not a part of this data set"


def _chain_lines(location: str, versions: Sequence[Source]) -> list[str]:
    newest = versions[0].manifest.number
    if newest == 1 or folder_and_version(location)[1]:
        return []
    numbers = [source.manifest.number for source in versions]
    missing = sorted(set(range(1, newest + 1)) - set(numbers))
    pruned = f"; not here any more: {', '.join(map(str, missing))}" if missing else ""
    return [f"{plural(len(versions), 'version')}, each by the digest in the newest{pruned}"]


@dataclass(frozen=True)
class Originals:
    """The images that a data set was made of, by SHA-256."""

    container: Container
    records: dict[bytes, Record]

    @classmethod
    def of(cls, source: Path) -> "Originals":
        """Read a folder, a zip, or a tar (also of tars) once; UsageError for anything else."""
        container = open_images(source, "--source")
        by_digest: dict[bytes, Record] = {}
        images = [record for record in container.records() if is_image(record.name)]
        with meter("read", len(images)) as shown:
            for record in images:
                try:
                    by_digest[sha256(container.read(record)).digest()] = record
                except Defect:
                    continue  # a conversion has left it out
                finally:
                    shown.advance(Progress(1, record.size))
        return cls(container, by_digest)


def compared(sample: Sample, where: str, has_tiles: bool, originals: Originals | None) -> str:
    """Return how an image compares with its original; empty where no originals are given.

    DataError if its list of tiles does not fit it in a data set that has tiles, or if its
    coefficients are not the original's.
    """
    frame = jpeg_frame(sample.image) if has_tiles else None
    tiled_frame = frame if frame and frame.tiles_at else None
    where = f"{where}: sample {sample.key}"
    if tiled_frame and not has_sound_tiles(sample.image, tiled_frame):
        raise DataError(f"{where}: its list of tiles does not fit it")
    if originals is None:
        return ""
    if sha256(sample.image).digest() in originals.records:
        return SAME_BYTES
    digest = original_digest(sample.image, tiled_frame) if tiled_frame else b""
    original = originals.records.get(digest)
    if original is None:
        return NO_ORIGINAL
    try:
        equal = same_coefficients(sample.image, originals.container.read(original))
    except (Refused, Defect) as error:
        raise DataError(f"{where}: cannot be compared with {original.name}: {error}") from None
    if not equal:
        raise DataError(f"{where}: its coefficients are not those of {original.name}")
    return SAME_COEFFICIENTS


def _verify_shard(
    stored: StoredShard, report: ReportProgress, originals: Originals | None
) -> tuple[Counter[str], list[str]]:
    source, shard = stored.source, stored.shard
    counts, faults = Counter[str](), list[str]()
    working_on(stored.where)
    try:
        for row, data in stored_samples(source, stored.split, stored.number):
            working_on(f"{stored.where}: the sample at byte {row['offset']}")
            try:
                sample = sample_of(source, shard, row, data)
                counts[compared(sample, stored.where, source.manifest.tiles, originals)] += 1
            except DataError as fault:
                faults.append(str(fault))
    except DataError as fault:  # the rest of the shard cannot be read, or its digest is wrong
        faults.append(str(fault))
    report(Progress(shard.samples, shard.bytes))
    return counts, faults


if __name__ == "__main__":
    from convert.__main__ import run_script

    run_script("verify")
