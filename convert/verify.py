"""Reading a whole shard folder again, from disk or over HTTP, to name what is wrong.

Of all its versions: a tar that several versions have is read once, and must have the same rows in
all their indexes.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from convert.images.transcoder import library
from convert.originals import Compared, Originals, compared
from convert.packing.copies import copies
from convert.packing.output_folder import Target, shard_files
from convert.packing.quality_report import report_lines
from convert.packing.stored_samples import StoredShard, rows_of, shards_of
from convert.packing.workers import in_parallel, working_on
from convert.progress import Progress, meter
from convert.readers.records import ImageDefect
from rackrun.commandline.options import Examples, Positional
from rackrun.errors import DataError, Unavailable, UsageError
from rackrun.machine import core_count
from rackrun.shard_folder import folder_and_version
from rackrun.terminal import clean
from rackrun.units import plural
from shards.open import open_source, sources_of
from shards.samples import sample_of, stored_samples
from shards.source import Loan, Source


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
        source = versions[0]
        originals = self._originals(source)
        faults, counts = list(strangers(versions)), Compared()
        indexes, jobs = list[SharedIndexes](), list[VerifyJob]()
        for version in versions:
            loans, index_faults = indexes_of(version)
            faults += index_faults
            new_jobs, row_faults = _jobs(versions, len(indexes), loans)
            faults += row_faults
            jobs += new_jobs
            indexes.append(SharedIndexes(version.location, loans))
        total = sum(job.stored.shard.samples for job in jobs)
        workers = self.workers or core_count()
        work = partial(_verify_shard, indexes=indexes, originals=originals)
        steps = in_parallel(jobs, work, workers)
        with closing(steps), meter("checked", total) as shown:
            for message in steps:
                if isinstance(message, Progress):
                    shown.advance(message)
                elif isinstance(message, Compared):
                    counts += message
                else:
                    faults.append(message)
        duplicates = [] if faults else report_lines(list(_copies(source)))
        self._print(versions, total, len(jobs), sorted(map(clean, faults)), counts, duplicates)
        if faults:
            raise DataError(
                f"{self.location}: {plural(len(faults), 'fault')}; convert or copy it again"
            )

    def _originals(self, source: Source) -> Originals | None:
        """Return the originals, read once, or None without --source."""
        if self.source is None:
            return None
        if source.manifest.tiles:
            library()  # or an error, before anything is read
        return Originals.of(self.source)

    def _print(
        self,
        versions: Sequence[Source],
        samples: int,
        shards: int,
        faults: list[str],
        counts: Compared,
        duplicates: list[str],
    ) -> None:
        if self.json:
            numbers = [version.manifest.number for version in versions]
            counted: dict[str, object] = {"location": self.location, "versions": numbers}
            counted |= {"samples": samples, "shards": shards}
            if self.source is not None:
                counted |= asdict(counts)
            sentences = {"faults": faults, "copies": [line.strip() for line in duplicates]}
            lines = [json.dumps(counted | sentences, indent=2)]
        elif faults:
            lines = faults
        else:
            counted_in_words = f"{plural(samples, 'sample')} in {plural(shards, 'shard')}"
            lines = [f"{self.location}: {counted_in_words}, all as it should be"]
            lines += [*_chain_lines(self.location, versions), *duplicates]
        if self.source is not None and not self.json:
            lines.append(
                f"{self.source}: {counts.same_bytes:,} images have the bytes of their originals, "
                f"{counts.same_coefficients:,} with restart tiles have their coefficients, "
                f"{counts.without_original:,} have no original there"
            )
        sys.stdout.write("".join(f"{line}\n" for line in lines))


class VerifyJob(NamedTuple):
    """A shard to verify."""

    version: int  # in the list of versions
    stored: StoredShard


def _jobs(
    versions: Sequence[Source], version: int, loans: Mapping[str, Loan]
) -> tuple[list[VerifyJob], list[str]]:
    """Return the shards of a version that none before it in the list has, and faults of others.

    The rows of a shard must be the same in all versions.
    """
    import numpy as np

    source, jobs, faults = versions[version], list[VerifyJob](), list[str]()
    newer = {
        stored.shard: (each, stored)
        for each in versions[:version]
        for stored in shards_of(each.manifest)
    }
    for stored in shards_of(source.manifest):
        if stored.split not in loans:
            continue
        if stored.shard not in newer:
            jobs.append(VerifyJob(version, stored))
            continue
        other, other_stored = newer[stored.shard]
        with suppress(DataError):  # which is named where the other version is looked at
            rows, other_rows = rows_of(source, stored).copy(), rows_of(other, other_stored)
            rows["shard"] = other_stored.number
            if not np.array_equal(rows, other_rows):
                where = f"{source.location}: {stored.shard.name}"
                faults.append(f"{where}: its rows differ from those in {other.location}")
    return jobs, faults


def _chain_lines(location: str, versions: Sequence[Source]) -> list[str]:
    """Return which versions have been read, and which are not there any more."""
    newest = versions[0].manifest.number
    if newest == 1 or folder_and_version(location)[1]:
        return []
    numbers = [source.manifest.number for source in versions]
    missing = sorted(set(range(1, newest + 1)) - set(numbers))
    pruned = f"; not here any more: {', '.join(map(str, missing))}" if missing else ""
    return [f"{plural(len(versions), 'version')}, each by the digest in the newest{pruned}"]


@dataclass(frozen=True)
class SharedIndexes:
    """What a worker needs to open the source with the indexes of the process that started it."""

    location: str
    loans: dict[str, Loan]

    @cached_property
    def source(self) -> Source:
        """The worker's own connection to the source."""
        source = open_source(self.location)
        for split, loan in self.loans.items():
            source.borrow_index(split, loan)
        return source


def indexes_of(source: Source) -> tuple[dict[str, Loan], list[str]]:
    """Read all indexes; return those that workers can borrow, by split, and the faults of others.

    Unavailable if the source cannot be reached.
    """
    loans, faults = {}, []
    for split in source.manifest.splits:
        try:
            loans[split.name] = source.lend_index(split.name)
        except Unavailable:
            raise
        except DataError as fault:
            faults.append(str(fault))
    return loans, faults


def _verify_shard(
    job: VerifyJob,
    report: Callable[[Progress | Compared | str], None],
    indexes: Sequence[SharedIndexes],
    originals: Originals | None,
) -> None:
    """Report every fault of a shard as a line, and at the end how much was read."""
    source, (split, number, shard) = indexes[job.version].source, job.stored
    where, counts = f"{source.location}: {shard.name}", Compared()
    working_on(where)
    try:
        for row, data in stored_samples(source, split, number):
            working_on(f"{where}: the sample at byte {row['offset']}")
            try:
                sample = sample_of(source, shard, row, data)
                counts += compared(sample, where, source.manifest.tiles, originals)
            except DataError as fault:
                report(str(fault))
    except DataError as fault:
        report(str(fault))
    report(counts)
    report(Progress(shard.samples, shard.bytes))


def _copies(source: Source) -> Iterator[ImageDefect]:
    """Yield the exact copies among the images of a data set that has no fault."""
    manifest = source.manifest
    indexes = [(split.name, source.index(split.name)) for split in manifest.splits]
    shards = {split.name: split.shards for split in manifest.splits}
    return copies(indexes, shards, manifest.classes, source.read)


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


if __name__ == "__main__":
    from convert.__main__ import run_script

    run_script("verify")
