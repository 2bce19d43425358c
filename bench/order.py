"""Measure the planning of an exact epoch, up to hundreds of millions of samples.

    python -m bench.order [--samples 1281167 14200000 100000000 400000000] [--ranks 8]

For each size, in a process of its own: CPU seconds and memory of the plan, which a rank makes once
per epoch; then of one of its loader workers, which plans its share of the epoch part by part. There
is no index: its rows are made on request, and the time for that is part of the first two columns.
"""

import multiprocessing
import os
import resource
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rackrun.commandline import parse, run
from shards.index import INDEX_FIELDS
from training.data.order.blocks import portions, shuffled
from training.data.order.reading import Reader, Reading
from training.data.order.shared import SharedOrder

PER_SHARD = 9000  # samples, of 110 KB on average: shards of 1 GB


@dataclass(frozen=True)
class Settings:
    """Measure the planning of an epoch."""

    samples: tuple[int, ...] = (1_281_167, 14_200_000, 100_000_000)
    """Sizes of the data set."""
    ranks: int = 8
    """Ranks, of 256 images per step each."""
    workers: int = 16
    """Loader workers of a rank."""


class Rows:
    """An index like ImageNet's that takes no memory."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._rows = np.zeros(1 << 17, INDEX_FIELDS)
        lengths = np.random.default_rng(0).lognormal(11.4, 0.5, self._rows.size)
        self._rows["length"] = (lengths.astype(np.int64) // 512 + 3) * 512

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, wanted: slice) -> npt.NDArray[np.void]:
        rows = self._rows[: wanted.stop - wanted.start].copy()
        rows["shard"] = np.arange(wanted.start, wanted.stop) // PER_SHARD
        return rows


def main(args: list[str]) -> None:
    """Print a line for each size."""
    settings = parse(Settings, "python -m bench.order", args)
    print(f"{settings.ranks} ranks with {settings.workers} workers each; seconds of a core, MB")
    print("    samples |  index  |  plan: s,  MB, kept | a worker: share s, whole epoch s,  MB")
    context = multiprocessing.get_context("spawn")
    for samples in settings.samples:
        process = context.Process(target=measured, args=(samples, settings))
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
        reader = Reader(settings.ranks - 1, settings.ranks, 0, settings.workers)
        reading = Reading(order, 0, batch, reader)
        known = time.process_time()
    for _ in reading.parts():
        pass
    read = time.process_time()
    print(
        f"{samples:11,} | {made - begun:5.2f} s |"
        f" {planned - made:7.2f} {plan_peak:5.0f} {kept:5.1f}"
        f" | {known - planned:11.2f} {read - known:15.2f} {peak() - base:6.0f}"
    )


def peak() -> float:
    """Return the peak memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    run(main)
