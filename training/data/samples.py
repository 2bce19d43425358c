"""From rows of the index to the images of a batch, whichever way the rows were chosen.

stored_samples   StoredSample: a verified sample (key, bytes, label) and the shard it lies in
decoded          its pixels; a damaged sample goes to Quarantine, which counts it or ends the run
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rackrun.errors import DataError
from rackrun.shards.samples import Sample, portions
from rackrun.shards.source import Source
from rackrun.terminal import clean
from rackrun.training.data.transforms import Decoded, Transforms
from rackrun.training.settings.data import DataSettings

READ_BYTES = 2 << 20  # at once
GROUP_BYTES = 16 << 20  # decoded before any is resized: 28 photographs of 500 x 375

Seed = tuple[int, ...]


class StoredSample(NamedTuple):
    """A sample and the name of its shard."""

    shard: str
    sample: Sample


class Quarantine:
    """The treatment of damaged samples: they end the run, or are left out and named.

    A rank has one, and each of its loader workers a copy. Workers send the names with their batches
    to the rank, which counts each once, however often and by whom it is read.
    """

    def __init__(self, config: DataSettings) -> None:
        self._limit = config.bad_samples_limit if config.bad_samples == "quarantine" else 0
        self._names: set[str] = set()
        self._news: list[str] = []

    def admit(self, stored: StoredSample, reason: DataError) -> None:
        """Name a bad sample; DataError if it is one too many."""
        name = f"{stored.shard}: {stored.sample.key}"
        what = clean(f"{reason}" if stored.sample.fault else f"{name}: {reason}")
        if not self._limit:
            raise DataError(f"{what}; type --bad-samples quarantine to leave such images out")
        self._add([name], what)  # here, too: a batch may never become full
        self._news.append(name)
        sys.stderr.write(f"left out: {what}\n")

    def news(self) -> list[str]:
        """Return what was left out since the last call."""
        news, self._news = self._news, []
        return news

    def count(self, left_out: Sequence[str]) -> None:
        """Count what a worker has left out of a batch; DataError at one bad sample too many."""
        self._add(left_out, clean(left_out[-1]))

    def _add(self, names: Sequence[str], what: str) -> None:
        self._names.update(names)
        if len(self._names) > self._limit:
            raise DataError(
                f"{what}: {len(self._names):,} images are left out; that is more than"
                f" --bad-samples-limit {self._limit}"
            )


def stored_samples(
    source: Source, split: str, rows: npt.NDArray[np.integer]
) -> Iterator[StoredSample]:
    """Yield the samples of ascending rows of the index, each checked against its row."""
    shards, found = source.manifest.split(split).shards, source.index(split)[rows]
    # A request has neighbors in one shard, and about READ_BYTES.
    borders = np.diff(rows) != 1
    borders |= (np.diff(found["offset"] // READ_BYTES) != 0) | (np.diff(found["shard"]) != 0)
    portions_of_rows = np.split(found, np.flatnonzero(borders) + 1) if len(rows) else []
    requests = [(shards[int(portion[0]["shard"])], portion) for portion in portions_of_rows]
    for (shard, _), samples in zip(requests, portions(source, requests), strict=True):
        for sample in samples:
            yield StoredSample(shard.name, sample)


def decoded(
    samples: Iterable[tuple[int, StoredSample]],
    most: int,
    transforms: Transforms,
    seed: Seed | None,
    quarantine: Quarantine,
) -> Iterator[tuple[int, StoredSample, Decoded]]:
    """Yield up to `most` numbered samples that are not bad, decoded, and take no more than needed.

    All that is random follows from the seed and the number of a sample; without a seed, images are
    for evaluation. A group is decoded before any of it is yielded.
    """
    group, held_bytes = list[tuple[int, StoredSample, Decoded]](), 0
    for number, stored in samples:
        try:
            if stored.sample.fault:
                raise stored.sample.fault
            random = None if seed is None else _generator((*seed, number))
            group.append((number, stored, transforms.decoded(stored.sample.image, random)))
        except DataError as error:
            quarantine.admit(stored, error)  # raises it unless bad samples may be left out
            continue
        held_bytes += group[-1][2].region.held_bytes
        if held_bytes >= GROUP_BYTES or len(group) == most:
            yield from group
            most -= len(group)
            group, held_bytes = [], 0  # the next images are decoded into the same memory
        if not most:
            return
    yield from group


def _generator(seed: Seed) -> np.random.Generator:
    # From 32-bit words numpy makes the same generator in half the time.
    words = np.array(seed, np.uint32) if max(seed) < 1 << 32 else seed
    return np.random.default_rng(words)
