"""The links of the chains that turn shards into batches; training.data.open puts them together.

drawn_shards   (shard number, first sample): drawn with replacement, endless
found_in       StoredSample: a verified sample (key, bytes, label) and the shard it lies in
rows_of        the same for neighbouring rows of the index, read by ranges
repeated       each sample several times, among others
numbered       (number, StoredSample), from where an interrupted chain resumes
filled         images of a batch, each decoded into its place; bad ones fail or are counted

With --gpu-decode, a place may hold a JPEG instead (training.data.gpu_decode).
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from rackrun.errors import DataError
from rackrun.terminal import clean
from shards.samples import portions
from shards.source import Source
from shards.verify import Sample
from training.config import DataSettings
from training.data.decode import Box, Pixels

READ_BYTES = 2 << 20  # at once

Seed = tuple[int, ...]


class JpegCrop(NamedTuple):
    """A JPEG that lies in the place of its pixels, and the part of it that the GPU is to decode."""

    length: int  # bytes
    box: Box
    mirror: bool


Prepare = Callable[[bytes, np.random.Generator, Pixels], JpegCrop | None]
"""Fills uint8 (size, size, channels) with an image as the model sees it, or with a JPEG."""


class StoredSample(NamedTuple):
    """A sample and the name of its shard."""

    shard: str
    sample: Sample


class Kept(NamedTuple):
    """A sample that has its place in a batch."""

    shard: str
    key: str
    label: int
    crop: JpegCrop | None


class LeftToGpu(NamedTuple):
    """A place of a batch with a JPEG in it."""

    place: int
    name: str  # of the sample, for messages
    crop: JpegCrop


class Batch(NamedTuple):
    """The images and labels of a step.

    Training images lie in memory that is used again (training.data.slots): on a CPU they stay until
    the next but one batch is asked for.
    """

    images: torch.Tensor  # uint8 (B, channels, size, size)
    labels: torch.Tensor  # int64 (B,)
    skipped: int = 0  # bad samples left out of it
    rows: torch.Tensor | None = None  # int64 (B,): their rows in the index, if known
    keys: Sequence[tuple[str, str]] = ()  # shard and key of each, in an evaluation
    left: Sequence[LeftToGpu] = ()  # places where the images still are JPEGs


class Quarantine:
    """The treatment of damaged samples: they end the run, or are left out and counted."""

    def __init__(self, config: DataSettings) -> None:
        self.limit = config.bad_samples_limit if config.bad_samples == "quarantine" else 0
        self.seen = 0
        self._reported = 0

    def admit(self, found: StoredSample, reason: DataError) -> None:
        """Count and name a bad sample; DataError if it is one too many."""
        self.seen += 1
        where = "" if found.sample.fault else f"{found.shard}: {found.sample.key}: "
        what = clean(f"{where}{reason}")
        if not self.limit:
            raise DataError(f"{what}; type --bad-samples quarantine to leave such images out")
        if self.seen > self.limit:
            raise DataError(f"{what}; that is more than --bad-samples-limit {self.limit}")
        sys.stderr.write(f"left out: {what}\n")

    def news(self) -> int:
        """Return how many were left out since the last call."""
        news, self._reported = self.seen - self._reported, self.seen
        return news


def drawn_shards(source: Source, split: str, seed: Seed) -> Iterator[tuple[int, int]]:
    """Yield shards drawn with replacement. The first one starts at a random sample.

    A lane reads few shards in an epoch, and the last of them only in part. If it always began at
    a shard's start, samples near the end would be seen less often.
    """
    random = np.random.default_rng(seed)
    sizes = np.array([shard.samples for shard in source.manifest.split(split).shards])
    position = int(random.integers(sizes.sum()))
    number = int(np.searchsorted(sizes.cumsum(), position, side="right"))
    yield number, position - int(sizes[:number].sum())
    while True:
        yield int(random.integers(len(sizes))), 0


def found_in(
    source: Source, split: str, shards: Iterable[tuple[int, int]], wanted: int
) -> Iterator[StoredSample]:
    """Yield the samples of these shards, each from its first wanted sample on.

    No byte after the first `wanted` samples is read before they are used up. They are read by
    ranges: each image's own checksum, in a verified index, is enough. The digest of a whole shard
    would cost a fifteenth of a worker's time.
    """
    sizes = [shard.samples for shard in source.manifest.split(split).shards]
    for number, first in shards:
        start = sum(sizes[:number])
        rows = range(start + first, start + sizes[number])
        yield from rows_of(source, split, rows[:wanted])
        yield from rows_of(source, split, rows[wanted:])
        wanted -= min(len(rows), wanted)


def rows_of(source: Source, split: str, rows: range) -> Iterator[StoredSample]:
    """Yield the samples of neighbouring rows of the index, each checked against its row."""
    shards = source.manifest.split(split).shards
    blocks = _blocks(source.index(split)[rows.start : rows.stop])
    wanted = [(shards[int(block[0]["shard"])], block) for block in blocks]
    for (shard, _), samples in zip(wanted, portions(source, wanted), strict=True):
        for sample in samples:
            yield StoredSample(shard.name, sample)


def _blocks(index: np.ndarray) -> list[np.ndarray]:
    """Return neighbouring rows in portions of one shard and about READ_BYTES."""
    block = index["offset"] // READ_BYTES
    borders = np.flatnonzero((np.diff(block) != 0) | (np.diff(index["shard"]) != 0)) + 1
    return np.split(index, borders) if len(index) else []


def numbered(found: Iterable[StoredSample], first: int) -> Iterator[tuple[int, StoredSample]]:
    """Yield samples with their numbers in the chain, from number `first` on."""
    return islice(enumerate(found), first, None)


def repeated(found: Iterable[StoredSample], times: int, apart: int) -> Iterator[StoredSample]:
    """Yield every sample that many times, that many places apart."""
    remaining = iter(found)
    while portion := list(islice(remaining, apart)):
        yield from portion * times


def filled(
    images: torch.Tensor,
    found: Iterable[tuple[int, StoredSample]],
    prepare: Prepare,
    seed: Seed,
    quarantine: Quarantine,
) -> list[Kept]:
    """Decode samples into uint8 (n, size, size, channels), until it is full or there are no more.

    Return those that have a place. All that is random follows from the seed and the sample's
    number.
    """
    places, kept = images.numpy(), list[Kept]()
    for number, stored in found:
        if one := prepared(places[len(kept)], number, stored, prepare, seed, quarantine):
            kept.append(one)
            if len(kept) == len(places):
                break
    return kept


def prepared(
    place: Pixels,
    number: int,
    stored: StoredSample,
    prepare: Prepare,
    seed: Seed,
    quarantine: Quarantine,
) -> Kept | None:
    """Decode a sample into its place; return None for a bad one that may be left out."""
    sample = stored.sample
    try:
        if sample.fault:
            raise sample.fault
        crop = prepare(sample.image, _random((*seed, number)), place)
    except DataError as error:
        quarantine.admit(stored, error)
        return None
    return Kept(stored.shard, sample.key, sample.label, crop)


def left_to_gpu(kept: Iterable[tuple[int, Kept]]) -> list[LeftToGpu]:
    """Return the places, given with their samples, where a JPEG lies."""
    return [
        LeftToGpu(place, f"{one.shard}: {one.key}", one.crop) for place, one in kept if one.crop
    ]


def _random(seed: Seed) -> np.random.Generator:
    """Return numpy's generator of a seed; words cost it half the time of Python's numbers."""
    if max(seed) >= 1 << 32:
        return np.random.default_rng(seed)
    return np.random.default_rng(np.array(seed, np.uint32))
