"""Draw training samples with replacement, in chains: a *lane* for each loader worker of each rank.

    drawn_shards       (shard number, first sample), endless
    samples_of_shards  StoredSample: a verified sample and the shard it lies in
    shuffled           by a buffer
    repeated           each sample several times, among others (--aug-repeats)
    filled             images of a batch (training.data.samples)

Everything random is a function of (seed, epoch, rank, lane, number).

With --aug-repeats, ranks that share their images draw them by the same random numbers, and augment
them by their own: the copies of an image are in one step, each on another rank. What the number of
ranks does not divide is repeated within a rank's batch.
"""

import math
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from rackrun.errors import Problem
from rackrun.shards.source import Source
from rackrun.training.data.loader import with_problems
from rackrun.training.data.pool import TRAIN
from rackrun.training.data.samples import (
    Batch,
    Quarantine,
    Seed,
    StoredSample,
    filled,
    rows_of,
)
from rackrun.training.data.slots import Slots, slots_for
from rackrun.training.data.transforms import Shape, TransformsOfEpoch
from rackrun.training.settings.data import DataSettings

os.environ["WDS_SECURE"] = "1"  # before webdataset is read: nothing in a name or a sample runs
import webdataset  # noqa: E402


@dataclass(frozen=True)
class LanePlan:
    """The settings that a lane needs to make its share of a rank's batches."""

    config: DataSettings
    source: Source
    transforms: TransformsOfEpoch
    rank: int
    world: int
    epoch_steps: int
    lanes: int

    def slots(self, in_flight: int, device: torch.device) -> Slots:
        """Return memory for the rank's batches, of which workers have `in_flight` under way."""
        config = self.config
        return slots_for(config.batch_size, self.transforms, config.epochs, in_flight, device)

    def share(self, first: int, last: int, lane: int) -> int:
        """Return how many of the steps in [first, last) a lane makes: every `lanes`-th."""
        # Lane 1 of 3 makes steps 1, 4, 7, …: (8 - 2) // 3 - (2 - 2) // 3 = 2 of [2, 8), 4 and 7.
        return (last - lane - 1) // self.lanes - (first - lane - 1) // self.lanes

    def samples(self, epoch: int, lane: int, done: int) -> Iterator[tuple[int, StoredSample]]:
        """Yield the numbered samples of a lane's epoch, from its batch number `done` on."""
        config, source = self.config, self.source
        sharing = math.gcd(self.world, config.aug_repeats)  # ranks that draw the same images
        times = config.aug_repeats // sharing  # that a rank has each sample it draws
        apart = max(config.batch_size // times, 1)  # samples from one copy to the next
        first = epoch * self.epoch_steps
        images = self.share(first, first + self.epoch_steps, lane) * config.batch_size
        # How many samples the lane draws in the epoch, each of them for all its copies.
        sample_count = -(-images // (apart * times)) * apart
        seed = config.seed, epoch, self.rank // sharing, lane  # equal where ranks share images
        shards = drawn_shards(source, seed)
        samples = samples_of_shards(source, shards, sample_count)
        samples = shuffled(samples, sample_count, config.shuffle_buffer, seed)
        samples = repeated(samples, times, apart)
        return islice(enumerate(samples), done * config.batch_size, None)


class FilledSlot(NamedTuple):
    """All but the images of a batch that a loader worker has decoded into a slot."""

    number: int  # of the batch, in the order in which the rank takes them
    shape: Shape
    labels: list[int]
    left_out: list[str]  # bad samples
    keys: list[tuple[str, str]]  # shard and key of each


def batch_in_slot(slots: Slots, filled_slot: FilledSlot) -> Batch:
    """Return the batch whose images lie in a slot."""
    number, shape, labels, left_out, keys = filled_slot
    images = slots.images(number, len(labels), shape).permute(0, 3, 1, 2)
    labels_in_slot = slots.labels(number, np.array(labels, np.int64))
    return Batch(images, labels_in_slot, left_out, keys=keys)


class ResampledStream(IterableDataset[FilledSlot | Problem]):
    """A rank's endless stream of training batches, made by its lanes in turn.

    A lane starts afresh at every epoch, and reads the samples that it uses in it, no others. Where
    a run resumes in the middle of an epoch, the lane walks again through the samples already used,
    without decoding them.
    """

    def __init__(self, plan: LanePlan, slots: Slots, start: int = 0) -> None:
        self.plan = plan
        self.slots = slots
        self.start = start

    def __iter__(self) -> Iterator[FilledSlot | Problem]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        # Worker n of those that DataLoader asks in turn goes on with the lane of the nth next step.
        lane = (self.start + number) % self.plan.lanes
        return with_problems(self._lane(lane, count(number, workers)))

    def _lane(self, lane: int, numbers: Iterator[int]) -> Iterator[FilledSlot]:
        plan, quarantine = self.plan, Quarantine(self.plan.config)
        step = self.start
        while True:
            epoch = step // plan.epoch_steps
            first, last = epoch * plan.epoch_steps, (epoch + 1) * plan.epoch_steps
            samples = plan.samples(epoch, lane, done=plan.share(first, step, lane))
            transforms, seed = plan.transforms(epoch), (plan.config.seed, epoch, plan.rank, lane)
            shape, prepare = transforms.training_shape, transforms.prepared_for_training
            for number in islice(numbers, plan.share(step, last, lane)):
                images = self.slots.images(number, plan.config.batch_size, shape)
                kept = filled(images, samples, prepare, seed, quarantine)
                labels = [each.label for each in kept]
                keys = [(each.shard, each.key) for each in kept]
                yield FilledSlot(number, shape, labels, quarantine.news(), keys)
            step = last


def drawn_shards(source: Source, seed: Seed) -> Iterator[tuple[int, int]]:
    """Yield numbers of shards drawn with replacement, and the sample in each to begin with."""
    random = np.random.default_rng(seed)
    sizes = np.array([shard.samples for shard in source.manifest.split(TRAIN).shards])
    # The first shard starts at a random sample: a lane reads few shards in an epoch, the last one
    # only in part. If it always began at a shard's start, the last samples would come less often.
    position = int(random.integers(sizes.sum()))
    number = int(np.searchsorted(sizes.cumsum(), position, side="right"))
    yield number, position - int(sizes[:number].sum())
    while True:
        yield int(random.integers(len(sizes))), 0


def samples_of_shards(
    source: Source, shards: Iterable[tuple[int, int]], sample_count: int
) -> Iterator[StoredSample]:
    """Yield the samples of these shards, each from its given first sample on.

    No byte after the first `sample_count` samples is read before they are used up. They are read by
    ranges: each image's own checksum, in a verified index, is enough. The digest of a whole shard
    would cost a fifteenth of a worker's time.
    """
    sizes = [shard.samples for shard in source.manifest.split(TRAIN).shards]
    for number, first in shards:
        start = sum(sizes[:number])
        rows = range(start + first, start + sizes[number])
        yield from rows_of(source, TRAIN, rows[:sample_count])
        yield from rows_of(source, TRAIN, rows[sample_count:])
        sample_count -= min(len(rows), sample_count)


def shuffled(
    samples: Iterator[StoredSample], sample_count: int, buffer: int, seed: Seed
) -> Iterator[StoredSample]:
    """Yield samples by a shuffle buffer, which is used up after the first `sample_count` of them.

    Further ones, in place of samples that are left out, follow as they come.
    """
    shuffle = webdataset.shuffle(buffer, initial=buffer // 10, rng=random.Random(str(seed)))
    yield from shuffle(islice(samples, sample_count))
    yield from samples


def repeated(samples: Iterable[StoredSample], times: int, apart: int) -> Iterator[StoredSample]:
    """Yield every sample that many times, that many places apart."""
    remaining = iter(samples)
    while portion := list(islice(remaining, apart)):
        yield from portion * times
