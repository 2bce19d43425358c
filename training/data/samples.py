"""From rows of the index to the images of a batch, whichever way the rows were chosen.

    rows_of          StoredSample: a verified sample (key, bytes, label) and the shard it lies in
    prepared_sample  its crop is drawn
    next_group       some samples are decoded, bad ones counted
    filled           their images are resized into the memory of a batch

With --gpu-decode, an image's memory may hold a JPEG instead (training.data.gpu_decode).
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from rackrun.errors import DataError
from rackrun.terminal import clean
from shards.samples import Sample, portions
from shards.source import Source
from training.data.decode import Pixels
from training.data.transforms import Fill, JpegCrop, Prepared
from training.settings.data import DataSettings

READ_BYTES = 2 << 20  # at once
GROUP_BYTES = 16 << 20  # decoded before any is resized: 28 photographs of 500 x 375

Seed = tuple[int, ...]
Prepare = Callable[[bytes, np.random.Generator], Prepared]
"""Draws the crop of an image for its place in a batch, and chooses what decodes it."""


class StoredSample(NamedTuple):
    """A sample and the name of its shard."""

    shard: str
    sample: Sample


class Kept(NamedTuple):
    """A sample that has its place in a batch."""

    number: int  # in its chain
    shard: str
    key: str
    label: int
    crop: JpegCrop | None


class LeftToGpu(NamedTuple):
    """An image of a batch whose memory holds a JPEG that the GPU decodes."""

    batch_index: int
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
    left: Sequence[LeftToGpu] = ()  # images that still are JPEGs


class Quarantine:
    """The treatment of damaged samples: they end the run, or are left out and counted."""

    def __init__(self, config: DataSettings) -> None:
        self.limit = config.bad_samples_limit if config.bad_samples == "quarantine" else 0
        self.bad_samples = 0
        self._reported = 0

    def admit(self, stored: StoredSample, reason: DataError) -> None:
        """Count and name a bad sample; DataError if it is one too many."""
        self.bad_samples += 1
        where = "" if stored.sample.fault else f"{stored.shard}: {stored.sample.key}: "
        what = clean(f"{where}{reason}")
        if not self.limit:
            raise DataError(f"{what}; type --bad-samples quarantine to leave such images out")
        if self.bad_samples > self.limit:
            raise DataError(f"{what}; that is more than --bad-samples-limit {self.limit}")
        sys.stderr.write(f"left out: {what}\n")

    def news(self) -> int:
        """Return how many were left out since the last call."""
        news, self._reported = self.bad_samples - self._reported, self.bad_samples
        return news


def rows_of(source: Source, split: str, rows: range) -> Iterator[StoredSample]:
    """Yield the samples of neighbouring rows of the index, each checked against its row."""
    shards = source.manifest.split(split).shards
    index = source.index(split)[rows.start : rows.stop]
    # A request has samples of one shard, and about READ_BYTES.
    block_numbers = index["offset"] // READ_BYTES
    borders = np.flatnonzero((np.diff(block_numbers) != 0) | (np.diff(index["shard"]) != 0)) + 1
    blocks = np.split(index, borders) if len(index) else []
    shard_blocks = [(shards[int(block[0]["shard"])], block) for block in blocks]
    for (shard, _), samples in zip(shard_blocks, portions(source, shard_blocks), strict=True):
        for sample in samples:
            yield StoredSample(shard.name, sample)


def filled(
    images: torch.Tensor,
    samples: Iterable[tuple[int, StoredSample]],
    prepare: Prepare,
    seed: Seed,
    quarantine: Quarantine,
) -> list[Kept]:
    """Decode numbered samples into uint8 (n, size, size, channels), until it is full or they end.

    Return those that have a place. All that is random follows from the seed and the sample's
    number.
    """
    prepared = (
        prepared_sample(number, stored, prepare, seed, quarantine) for number, stored in samples
    )
    pixels, kept = images.numpy(), list[Kept]()
    while group := next_group(prepared, len(pixels) - len(kept), quarantine):
        samples_decoded = filter(None, group)
        kept += [
            decoded.into(out)
            for decoded, out in zip(samples_decoded, pixels[len(kept) :], strict=False)
        ]
        group.clear()  # the next one is decoded into the same memory
    return kept


class DecodedSample(NamedTuple):
    """A sample whose image is decoded but has no place yet."""

    number: int
    stored: StoredSample
    fill: Fill

    def into(self, out: Pixels) -> Kept:
        """Write the image into `out`, uint8 (size, size, channels)."""
        sample = self.stored.sample
        crop = self.fill(out)
        return Kept(self.number, self.stored.shard, sample.key, sample.label, crop)


class PreparedSample(NamedTuple):
    """A sample whose crop is drawn."""

    number: int
    stored: StoredSample
    image: Prepared

    def decoded(self, quarantine: Quarantine) -> DecodedSample | None:
        """Decode the image; return None for a bad one that may be left out."""
        try:
            return DecodedSample(self.number, self.stored, self.image.decode())
        except DataError as error:
            quarantine.admit(self.stored, error)
            return None


def prepared_sample(
    number: int, stored: StoredSample, prepare: Prepare, seed: Seed, quarantine: Quarantine
) -> PreparedSample | None:
    """Draw the crop of a sample; return None for a bad one that may be left out."""
    sample, entropy = stored.sample, (*seed, number)
    try:
        if sample.fault:
            raise sample.fault
        # Words cost numpy half the time of Python's numbers, and give the same generator.
        words = np.array(entropy, np.uint32) if max(entropy) < 1 << 32 else entropy
        return PreparedSample(number, stored, prepare(sample.image, np.random.default_rng(words)))
    except DataError as error:
        quarantine.admit(stored, error)
        return None


def next_group(
    prepared: Iterator[PreparedSample | None], most: int, quarantine: Quarantine
) -> list[DecodedSample | None]:
    """Decode the next samples, `most` at most, and about GROUP_BYTES of pixels; none at the end.

    Not one sample more is asked for: it would be lost to the next batch.
    """
    group, held_bytes = list[PreparedSample | None](), 0
    for sample in islice(prepared, most):
        group.append(sample)
        held_bytes += sample.image.held_bytes if sample else 0
        if held_bytes >= GROUP_BYTES:
            break
    return [sample and sample.decoded(quarantine) for sample in group]


def left_to_gpu(kept: Iterable[tuple[int, Kept]]) -> list[LeftToGpu]:
    """Return which of these samples, with their indices in the batch, still are JPEGs."""
    return [
        LeftToGpu(index, f"{sample.shard}: {sample.key}", sample.crop)
        for index, sample in kept
        if sample.crop
    ]
