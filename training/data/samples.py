"""From rows of the index to the images of a batch, whichever way the rows were chosen.

    stored_samples   StoredSample: a verified sample (key, bytes, label) and the shard it lies in
    filled           KeptSample: its image is in its place in a batch; bad samples are counted

`filled` takes samples in groups: it draws the crops of all, then decodes all, then resizes all.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rackrun.errors import DataError
from rackrun.shards.samples import Sample, portions
from rackrun.shards.source import Source
from rackrun.terminal import clean
from rackrun.training.data.decode import Region
from rackrun.training.data.transforms import Drawn, Transforms
from rackrun.training.settings.data import DataSettings

READ_BYTES = 2 << 20  # at once
GROUP_BYTES = 16 << 20  # decoded before any is resized: 28 photographs of 500 x 375

Seed = tuple[int, ...]


class StoredSample(NamedTuple):
    """A sample and the name of its shard."""

    shard: str
    sample: Sample


class KeptSample(NamedTuple):
    """A sample whose image has a place in a batch."""

    batch_index: int
    number: int  # in its chain
    shard: str
    key: str
    label: int


class Batch(NamedTuple):
    """The images and labels of a step.

    Training images lie in memory that is used again (training.data.slots): on a CPU they stay until
    the next but one batch is asked for.
    """

    images: torch.Tensor  # uint8 (B, channels, size, size)
    labels: torch.Tensor  # int64 (B,)
    left_out: Sequence[str] = ()  # bad samples that are not in it
    rows: torch.Tensor | None = None  # int64 (B,): their rows in the index, if known
    keys: Sequence[tuple[str, str]] = ()  # shard and key of each; of noise none

    @property
    def skipped(self) -> int:
        """How many bad samples are not in it."""
        return len(self.left_out)


class Quarantine:
    """The treatment of damaged samples: they end the run, or are left out and named.

    Each process that decodes has one, and counts what it has left out itself; a rank adds up what
    its loader workers name (LeftOut).
    """

    def __init__(self, config: DataSettings) -> None:
        self.limit = _limit(config)
        self._names: set[str] = set()
        self._news: list[str] = []

    def admit(self, stored: StoredSample, reason: DataError) -> None:
        """Name a bad sample; DataError if it is one too many."""
        name = f"{stored.shard}: {stored.sample.key}"
        what = clean(f"{reason}" if stored.sample.fault else f"{name}: {reason}")
        if not self.limit:
            raise DataError(f"{what}; type --bad-samples quarantine to leave such images out")
        self._names.add(name)
        self._news.append(name)
        if len(self._names) > self.limit:  # a batch may never become full
            raise DataError(f"{what}; that is more than --bad-samples-limit {self.limit}")
        sys.stderr.write(f"left out: {what}\n")

    def news(self) -> list[str]:
        """Return what was left out since the last call."""
        news, self._news = self._news, []
        return news


class LeftOut:
    """The bad samples that a rank has left out, each counted once however often it is read."""

    def __init__(self, config: DataSettings) -> None:
        self._limit = _limit(config)
        self._names: set[str] = set()

    def counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of all loader workers; DataError at one bad sample too many."""
        for batch in batches:
            self._names.update(batch.left_out)
            if len(self._names) > self._limit:
                raise DataError(
                    f"{clean(batch.left_out[-1])}: {len(self._names):,} images are left out; that"
                    f" is more than --bad-samples-limit {self._limit}"
                )
            yield batch


def _limit(config: DataSettings) -> int:
    return config.bad_samples_limit if config.bad_samples == "quarantine" else 0


def stored_samples(
    source: Source, split: str, rows: npt.NDArray[np.integer]
) -> Iterator[StoredSample]:
    """Yield the samples of ascending rows of the index, each checked against its row."""
    shards, found = source.manifest.split(split).shards, source.index(split)[rows]
    # A request has neighbours in one shard, and about READ_BYTES.
    borders = np.diff(rows) != 1
    borders |= (np.diff(found["offset"] // READ_BYTES) != 0) | (np.diff(found["shard"]) != 0)
    portions_of_rows = np.split(found, np.flatnonzero(borders) + 1) if len(rows) else []
    requests = [(shards[int(portion[0]["shard"])], portion) for portion in portions_of_rows]
    for (shard, _), samples in zip(requests, portions(source, requests), strict=True):
        for sample in samples:
            yield StoredSample(shard.name, sample)


class DrawnSample(NamedTuple):
    """A sample whose crop is drawn."""

    number: int
    stored: StoredSample
    drawn: Drawn


def filled(
    images: torch.Tensor,
    samples: Iterable[tuple[int, StoredSample]],
    transforms: Transforms,
    seed: Seed | None,
    quarantine: Quarantine,
    batch_indices: Sequence[int] | None = None,
) -> list[KeptSample]:
    """Decode numbered samples into uint8 (n, size, size, channels), until it is full or they end.

    Return those that are not bad. They lie one after the other unless `batch_indices` has the index
    of each sample. All that is random follows from the seed and the sample's number; without a
    seed, images are for evaluation.
    """
    drawn = (_drawn(number, stored, transforms, seed, quarantine) for number, stored in samples)
    pixels, kept = images.numpy(), list[KeptSample]()
    indices, used = range(len(pixels)) if batch_indices is None else batch_indices, 0
    while group := _next_group(drawn, len(indices) - used):
        regions = [_decoded(each, quarantine) for each in group]
        for each, region in zip(group, regions, strict=True):
            if each and region:
                transforms.fill(pixels[indices[used]], region, each.drawn)
                shard, sample = each.stored
                place = indices[used], each.number
                kept.append(KeptSample(*place, shard, sample.key, sample.label))
            if region or batch_indices:  # the image of a bad sample's own index stays empty
                used += 1
        del regions, region  # the next images are decoded into the same memory
    return kept


def _drawn(
    number: int,
    stored: StoredSample,
    transforms: Transforms,
    seed: Seed | None,
    quarantine: Quarantine,
) -> DrawnSample | None:
    try:
        if stored.sample.fault:
            raise stored.sample.fault
        random = None if seed is None else _generator((*seed, number))
        return DrawnSample(number, stored, transforms.drawn(stored.sample.image, random))
    except DataError as error:
        quarantine.admit(stored, error)  # raises it unless bad samples may be left out
        return None


def _generator(entropy: Seed) -> np.random.Generator:
    # From 32-bit words numpy makes the same generator in half the time.
    words = np.array(entropy, np.uint32) if max(entropy) < 1 << 32 else entropy
    return np.random.default_rng(words)


def _next_group(drawn: Iterator[DrawnSample | None], most: int) -> list[DrawnSample | None]:
    group, held_bytes = list[DrawnSample | None](), 0
    for sample in islice(drawn, most):  # not one more: it would be lost to the next batch
        group.append(sample)
        held_bytes += sample.drawn.crop.held_bytes if sample else 0
        if held_bytes >= GROUP_BYTES:
            break
    return group


def _decoded(sample: DrawnSample | None, quarantine: Quarantine) -> Region | None:
    try:
        return sample and sample.drawn.crop.decoded()
    except DataError as error:
        assert sample
        quarantine.admit(sample.stored, error)
        return None
