"""Draw training samples by webdataset: shards with replacement, mixed by a shuffle buffer.

    ResampledShards    {"url": the name of a shard}, endless
    samples            StoredSample: every sample of each; where there is an index, by its row
    shuffle            the same, mixed
    batches            FilledSlot: images in a slot

Each loader worker of each rank draws its own, by the seed of the run, the step at which it
started, the rank and the worker. So the same command draws the same samples, and a run that
resumes draws new ones: a stream is not read again up to the place where it was.

The index says which samples a shard has, and their labels: what was dropped is not read, and what
was relabelled has its new label.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np
import webdataset
from torch.utils.data import IterableDataset, get_worker_info

from rackrun.errors import Problem
from rackrun.shards.source import Source
from rackrun.training.data.loader import loaded, on_device, with_problems, worker_count
from rackrun.training.data.pool import TRAIN
from rackrun.training.data.samples import (
    Batch,
    Quarantine,
    StoredSample,
    filled,
    stored_samples,
)
from rackrun.training.data.slots import AHEAD, FilledSlot, Slots, slots_for
from rackrun.training.data.transforms import TransformsOfEpoch
from rackrun.training.ranks import Ranks
from rackrun.training.settings.data import DataSettings


class Shards(Protocol):
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
    config: DataSettings,
    shards: Shards,
    transforms: TransformsOfEpoch,
    ranks: Ranks,
    epoch_steps: int,
    start: int,
) -> Iterator[Batch]:
    """Yield a rank's batches from a step on, without end: other ones than from another step on."""
    workers = worker_count(config, ranks)
    slots = slots_for(config.batch_size, transforms, config.epochs, AHEAD * workers, ranks.device)
    stream = ResampledStream(config, shards, transforms, slots, ranks.rank, epoch_steps, start)
    return on_device(map(slots.batch, loaded(stream, workers)), ranks.device)


@dataclass(frozen=True)
class ResampledStream(IterableDataset[FilledSlot | Problem]):
    """A rank's endless stream of training batches, made by its loader workers in turn."""

    config: DataSettings
    shards: Shards
    transforms: TransformsOfEpoch
    slots: Slots
    rank: int
    epoch_steps: int
    start: int
    """The first step."""

    def __iter__(self) -> Iterator[FilledSlot | Problem]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return with_problems(self._batches(number, workers))

    def _batches(self, worker: int, workers: int) -> Iterator[FilledSlot]:
        config, quarantine = self.config, Quarantine(self.config)
        seed = config.seed, self.start, self.rank, worker
        samples = enumerate(self._samples(seed))
        for number in count(worker, workers):
            transforms = self.transforms((self.start + number) // self.epoch_steps)
            shape = transforms.training_shape
            images = self.slots.images(number, config.batch_size, shape)
            kept = filled(images, samples, transforms, seed, quarantine)
            labels = [each.label for each in kept]
            keys = [(each.shard, each.key) for each in kept]
            yield FilledSlot(number, shape, labels, quarantine.news(), keys)

    def _samples(self, seed: tuple[int, ...]) -> Iterator[StoredSample]:
        first, second = np.random.SeedSequence(seed).generate_state(2).tolist()
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
