"""Reading a whole shard folder again, from disk or over HTTP, to name what is wrong.

Of its versions one is read; an earlier one has the same tars, and is verified when it is used.
"""

import json
import sys
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.convert.packing.copies import SplitRows, copies
from rackrun.convert.packing.output_folder import Target, shard_files
from rackrun.convert.packing.quality_report import report_lines
from rackrun.convert.packing.stored_samples import StoredShard, shards_of
from rackrun.convert.packing.workers import in_parallel, working_on
from rackrun.errors import DataError, Unavailable, UsageError
from rackrun.machine import core_count
from rackrun.shard_folder import folder_and_version
from rackrun.shards.open import sources_of
from rackrun.shards.samples import sample_of, stored_samples
from rackrun.shards.source import Source
from rackrun.terminal import clean
from rackrun.units import plural


@dataclass(frozen=True)
class Verify:
    """Read everything, and check that shards, indexes and manifest agree in every byte."""

    examples: ClassVar[Examples] = (
        ("{prog} data/shards", "check every byte"),
        ("{prog} http://server:8080/", "of a served folder"),
        ("{prog} data/shards@2", "of version 2"),
    )

    location: Positional[str]
    """Shard folder, or the http(s):// URL of one; for one of its versions: DATA@2."""
    workers: int = 0
    """Number of processes; 0: one per core."""
    json: bool = False
    """Print JSON: location, version, samples, shards; faults and copies as lists of text."""

    def run(self) -> None:
        """Verify; DataError after everything that is wrong has been named."""
        if self.workers < 0:
            raise UsageError("--workers cannot be negative")
        source, *earlier = sources_of(self.location)
        manifest = source.manifest
        shards, faults_of_indexes = shards_of(source), _faults_of_indexes(source)
        samples = sum(stored.shard.samples for stored in shards)
        verify = partial(_verify_shard, faults_of_indexes)
        faults = [*faults_of_indexes.values()]
        faults += _unlisted_files(self.location, [source, *earlier])
        workers = self.workers or core_count()
        faults += chain(*in_parallel(shards, verify, workers, "checked", samples))
        duplicates = list[str]()
        if not faults:
            splits = [
                SplitRows(split.name, split.shards, source.index(split.name))
                for split in manifest.splits
            ]
            duplicates = report_lines([*copies(splits, manifest.classes, source.read)])
        faults = sorted(map(clean, faults))
        if self.json:
            report = {
                "location": self.location,
                "version": manifest.number,
                "samples": samples,
                "shards": len(shards),
                "faults": faults,
                "copies": [line.strip() for line in duplicates],
            }
            lines = [json.dumps(report, indent=2)]
        elif faults:
            lines = faults
        else:
            what = f"{plural(samples, 'sample')} in {plural(len(shards), 'shard')}"
            lines = [f"{self.location}: {what}, all correct", *duplicates]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        if faults:
            count = plural(len(faults), "fault") + (", first" if len(faults) > 1 else "")
            raise DataError(f"{self.location}: {count}: {faults[0]}; convert or copy it again")


def _faults_of_indexes(source: Source) -> dict[str, str]:
    """Return, by split, why an index cannot be read."""
    faults = dict[str, str]()
    for split in source.manifest.splits:
        try:
            source.index(split.name)  # read before the fork, so that all workers have it
        except Unavailable:
            raise
        except DataError as fault:
            faults[split.name] = str(fault)
    return faults


def _unlisted_files(location: str, versions: Sequence[Source]) -> list[str]:
    """Return shards and indexes in a local folder that no version lists."""
    if "://" in location or folder_and_version(location)[1]:
        return []
    folder, dataset = Path(location), versions[0].manifest.dataset
    listed = Target(folder).planned()  # of an append that was interrupted
    listed = listed.union(*(version.manifest.files() for version in versions))
    unlisted = sorted(shard_files(folder, dataset) - listed)
    return [f"{folder / name}: not a part of this data set" for name in unlisted]


def _verify_shard(without_index: Container[str], stored: StoredShard) -> list[str]:
    """Return the faults of a shard; in a split without an index, by its digest alone."""
    source, shard, faults = stored.source, stored.shard, list[str]()
    working_on(stored.where, images=0)
    try:
        if stored.split in without_index:
            deque(source.stream(shard), maxlen=0)
            return []
        for row, data in stored_samples(source, stored.split, stored.number):
            working_on(f"{stored.where}: the sample at byte {row['offset']}")
            try:
                sample_of(source, shard, row, data)
            except DataError as fault:
                faults.append(str(fault))
    except DataError as fault:  # the rest of the shard cannot be read, or its digest is wrong
        faults.append(str(fault))
    return faults
