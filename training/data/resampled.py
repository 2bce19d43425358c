"""Draw training samples by webdataset: shards with replacement, mixed by a shuffle buffer.

    ResampledShards    {"url": the name of a shard}, endless
    samples            StoredSample: every sample of each; where there is an index, by its row
    shuffle            the same, mixed
    BatchStream        batches in the ring (training.data.batch_stream)

Each loader worker of each rank draws its own, by the seed of the run, the step at which it
started, the rank and the worker. So the same command draws the same samples, and a run that
resumes draws new ones: a stream is not read again up to the place where it was.

The index says which samples a shard has, and their labels: what was dropped is not read, and what
was relabelled has its new label.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import webdataset

from rackrun.shards.source import Source
from rackrun.training.data.batch_stream import BatchStream
from rackrun.training.data.loader import Loader
from rackrun.training.data.pool import TRAIN
from rackrun.training.data.samples import Batch, Seed, StoredSample, stored_samples
from rackrun.training.data.transforms import Transforms, TransformsOfEpoch, training_shapes


class DrawableShards(Protocol):
    """Shards that can be drawn, by their names."""

    @property
    def names(self) -> tuple[str, ...]:
        """All shards, in order."""

    def samples(self, name: str) -> Iterator[StoredSample]:
        """Yield the samples of a shard, in order."""


class IndexedShards(NamedTuple):
    """The shards of a data set with an index."""

    source: Source

    @property
    def names(self) -> tuple[str, ...]:
        """All shards, in the order of the index."""
        return tuple(shard.name for shard in self.source.manifest.split(TRAIN).shards)

    def samples(self, name: str) -> Iterator[StoredSample]:
        """Yield the samples of a shard that the index has, each verified by its row."""
        number = self.names.index(name)
        rows = np.searchsorted(self.source.index(TRAIN)["shard"], (number, number + 1))
        return stored_samples(self.source, TRAIN, np.arange(*rows))


def resampled_batches(
    loader: Loader,
    shards: DrawableShards,
    transforms: TransformsOfEpoch,
    epoch_steps: int,
    start: int,
) -> Iterator[Batch]:
    """Yield a rank's batches from a step on, without end: other ones than from another step on."""
    config = loader.config
    ring = loader.ring(config.batch_size, *training_shapes(transforms, config.epochs))
    rank = loader.ranks.rank
    stream = ResampledStream(
        config, ring, loader.quarantine, transforms, shards, rank, epoch_steps, start
    )
    return loader.batches(stream, ring)


@dataclass(frozen=True)
class ResampledStream(BatchStream):
    """A rank's endless stream of training batches."""

    shards: DrawableShards
    rank: int
    epoch_steps: int
    start: int
    """The first step."""

    def seed(self, worker: int) -> Seed:
        """Return the seed of what a loader worker draws."""
        return self.config.seed, self.start, self.rank, worker

    def transforms_of(self, number: int) -> Transforms:
        """Return those of the epoch that a batch is in."""
        return self.transforms((self.start + number) // self.epoch_steps)

    def samples(self, worker: int, workers: int) -> Iterator[StoredSample]:
        """Yield the samples that a loader worker draws."""
        first, second = np.random.SeedSequence(self.seed(worker)).generate_state(2).tolist()
        names, buffer = list(self.shards.names), self.config.shuffle_buffer
        return iter(
            webdataset.DataPipeline(
                webdataset.ResampledShards(names, deterministic=True, worker_seed=lambda: first),
                self._samples_of_shards,
                webdataset.shuffle(buffer, initial=buffer // 10, rng=random.Random(second)),
            )
        )

    def _samples_of_shards(self, drawn: Iterable[dict[str, str]]) -> Iterator[StoredSample]:
        for shard in drawn:
            yield from self.shards.samples(shard["url"])
