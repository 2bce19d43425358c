"""Reading a whole shard folder again, from disk or over HTTP, to name what is wrong."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tyro.conf import Positional

from convert.packing.workers import in_parallel
from convert.progress import Progress, meter
from rackrun.errors import DataError, UsageError
from rackrun.machine import core_count
from rackrun.terminal import clean
from rackrun.units import plural
from shards.open import open_source
from shards.samples import stored_samples
from shards.source import Source
from shards.verify import sample_of


@dataclass(frozen=True)
class Verify:
    """Read everything again, and check that shards, indexes and manifest agree in every byte."""

    location: Positional[str]
    """Shard folder, or the http(s):// URL of one."""
    workers: int = 0
    """Processes; 0: one per core."""
    json: bool = False
    """Print JSON: location, samples, shards, and faults, a list of sentences."""

    def run(self) -> None:
        """Verify; DataError after everything that is wrong has been named."""
        if self.workers < 0:
            raise UsageError("--workers cannot be negative")
        source = open_source(self.location)
        faults = list(strangers(source))
        jobs = [
            VerifyJob(self.location, split.name, number)
            for split in source.manifest.splits
            for number in range(len(split.shards))
        ]
        total = sum(split.samples for split in source.manifest.splits)
        workers = self.workers or core_count()
        steps = in_parallel(jobs, verify_shard, workers)
        with closing(steps), meter("checked", total) as shown:
            for message in steps:
                if isinstance(message, Progress):
                    shown.advance(message)
                else:
                    faults.append(message)
        self._print(total, len(jobs), sorted(map(clean, faults)))
        if faults:
            raise DataError(
                f"{self.location}: {plural(len(faults), 'fault')}; convert or copy it again"
            )

    def _print(self, samples: int, shards: int, faults: list[str]) -> None:
        if self.json:
            counted = {"location": self.location, "samples": samples, "shards": shards}
            lines = [json.dumps({**counted, "faults": faults}, indent=2)]
        elif faults:
            lines = faults
        else:
            counted_in_words = f"{plural(samples, 'sample')} in {plural(shards, 'shard')}"
            lines = [f"{self.location}: {counted_in_words}, all as it should be"]
        sys.stdout.write("".join(f"{line}\n" for line in lines))


class VerifyJob(NamedTuple):
    """A shard to verify."""

    location: str
    split: str
    number: int


def verify_shard(job: VerifyJob, report: Callable[[Progress | str], None]) -> None:
    """Report every fault of a shard as a line, and at the end how much was read."""
    source = open_source(job.location)
    shard = source.manifest.split(job.split).shards[job.number]
    try:
        for row, data in stored_samples(source, job.split, job.number):
            try:
                sample_of(source, shard, row, data)
            except DataError as fault:
                report(str(fault))
    except DataError as fault:
        report(str(fault))
    report(Progress(shard.samples, shard.bytes))


def strangers(source: Source) -> Iterator[str]:
    """Yield shards and indexes in a local folder that its manifest does not list."""
    folder = Path(source.location)
    if "://" in source.location:
        return
    known = source.manifest.files()
    ours = re.compile(rf"{source.manifest.dataset}-[a-z]+(-\d{{6}}\.tar|\.index\.npy)")
    for path in sorted(folder.iterdir()):
        if ours.fullmatch(path.name) and path.name not in known:
            yield f"{path}: not a part of this data set"
