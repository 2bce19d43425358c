"""Measure what an exact epoch costs beside the images, up to hundreds of millions of samples.

    python -m bench.order [--samples 1281167 14200000 100000000 400000000] [--ranks 8] [--index]

For each size, in a process of its own: CPU seconds and memory of the plan, which a rank makes once
per epoch; then of one of its loader workers, which plans its share of the epoch part by part. There
is no index: its rows are made on request, and the time for that is part of the first two columns.

With --index, the same for the index as the first rank of a node reads, verifies and shares it.
"""

import hashlib
import multiprocessing
import os
import resource
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.usage import PeakMemory, resident_mb
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.shards.folder import FolderSource
from rackrun.shards.index import (
    INDEX_FIELDS,
    TAR_END_BYTES,
    Manifest,
    Shard,
    Split,
    index_bytes,
    serialise_index,
)
from rackrun.training.data.order.cut import Cut
from rackrun.training.data.order.epoch import portions, shuffled
from rackrun.training.data.order.reading import Reader, Reading
from rackrun.training.data.order.shared import SharedOrder

PER_SHARD = 9000  # samples, of 110 KB on average: shards of 1 GB
SAMPLE_BYTES = 110_080


@dataclass(frozen=True)
class Settings:
    """Measure the planning of an epoch."""

    samples: tuple[int, ...] = (1_281_167, 14_200_000, 100_000_000)
    """Sizes of the data set."""
    ranks: int = 8
    """Ranks, of 256 images per step each."""
    workers: int = 16
    """Loader workers of a rank."""
    index: bool = False
    """Measure the index, which takes 100 bytes of memory per sample and more."""


class Rows:
    """An index like ImageNet's that takes no memory."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._rows = np.zeros(1 << 17, INDEX_FIELDS)
        lengths = np.random.default_rng(0).lognormal(11.4, 0.5, self._rows.size)
        self._rows["length"] = (lengths.astype(np.int64) // 512 + 3) * 512

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, span: slice) -> npt.NDArray[np.void]:
        rows = self._rows[: span.stop - span.start].copy()
        rows["shard"] = np.arange(span.start, span.stop) // PER_SHARD
        return rows


def main(args: list[str]) -> None:
    """Print a line for each size."""
    settings = parse(Settings, "python -m bench.order", args)
    print(f"{settings.ranks} ranks with {settings.workers} workers each; seconds of a core, MB")
    if not settings.index:
        print("    samples |  index  |  plan: s,  MB, kept | a worker: share s, whole epoch s,  MB")
    context = multiprocessing.get_context("spawn")
    act = index_read if settings.index else measured
    for samples in settings.samples:
        process = context.Process(target=act, args=(samples, settings))
        process.start()
        process.join()


def measured(samples: int, settings: Settings) -> None:
    """Plan an epoch, and read all of one worker's share of it."""
    index, batch = Rows(samples), 256 * settings.ranks
    begun, base = time.process_time(), peak()
    for _ in portions(index, range(samples)):  # type: ignore[arg-type]
        pass
    made = time.process_time()
    shared = SharedOrder()
    with shared.of(0, lambda epoch: shuffled(index, range(samples), 0, epoch, batch)) as order:  # type: ignore[arg-type]
        planned, plan_peak = time.process_time(), peak() - base
        kept = os.fstat(shared._memory).st_size / 1e6
        reader = Reader(settings.ranks - 1, Cut.even(settings.ranks), 0, settings.workers)
        reading = Reading(order, 0, batch, reader)
        reading_planned = time.process_time()
    for _ in reading.parts():
        pass
    read = time.process_time()
    print(
        f"{samples:11,} | {made - begun:5.2f} s |"
        f" {planned - made:7.2f} {plan_peak:5.0f} {kept:5.1f}"
        f" | {reading_planned - planned:11.2f} {read - reading_planned:15.2f} {peak() - base:6.0f}"
    )


class Stored(FolderSource):
    """A shard folder of that many samples that has an index and a manifest, in memory."""

    def __init__(self, samples: int) -> None:
        super().__init__("memory")
        rows = np.zeros(samples, INDEX_FIELDS)
        rows["shard"], within = np.divmod(np.arange(samples), PER_SHARD)
        rows["length"], rows["offset"] = SAMPLE_BYTES, within * SAMPLE_BYTES
        rows["image_offset"], rows["image_length"] = rows["offset"], SAMPLE_BYTES
        sizes = [min(PER_SHARD, samples - at) for at in range(0, samples, PER_SHARD)]
        shards = tuple(
            Shard(f"{at}.tar", size, size * SAMPLE_BYTES + TAR_END_BYTES, "0" * 64)
            for at, size in enumerate(sizes)
        )
        self._stored = serialise_index(rows.tobytes())
        digest = hashlib.sha256(self._stored).hexdigest()
        split = Split("train", samples, "train.index.npy", digest, shards)
        self._manifest = Manifest("memory", ("image",), (split,))

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return the index, and keep no copy of it, as for a file that is read."""
        stored, self._stored = self._stored, b""
        return stored


def index_read(samples: int, settings: Settings) -> None:
    """Print what it costs to read an index, to verify it and to share it."""
    source, stored = Stored(samples), index_bytes(samples) / 1e6
    begun, held = time.process_time(), resident_mb()
    with PeakMemory(resident_mb, 0.005) as most:
        source.lend_index("train")
    print(
        f"{samples:11,} | index  | {time.process_time() - begun:6.2f} s,"
        f" {stored:,.0f} MB in the file, {most.mb - held + stored:,.0f} MB at most"
    )


def peak() -> float:
    """Return the peak memory of this process's life, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    run(main)
