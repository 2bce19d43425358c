"""Open a data set for training and validation: chains of the links in training.data.samples.

Training, resampled: each loader worker of each rank runs a chain of its own, a *lane*.

    drawn_shards -> samples_of_shards -> shuffled -> repeated -> numbered -> filled

Exact epochs are in training.data.exact, and validation, which is always complete, in
training.data.validation.

Everything random is a function of (seed, epoch, rank, lane, number): the same run sees the same
images, also after an interruption. Batches leave the workers as uint8.

With --aug-repeats, ranks that share their images draw them by the same random numbers, and augment
them by their own: the copies of an image are in one step, each on another rank. What the number of
ranks does not divide is repeated within a rank's batch.
"""

import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from rackrun.errors import Problem
from shards.source import Source
from training.data.exact import Planned
from training.data.gpu_decode import gpu_decoder, preparing
from training.data.loader import loaded, on_device, with_problems, worker_count
from training.data.node_cache import NodeCache
from training.data.order.cut import Cut
from training.data.pool import opened, share_index
from training.data.samples import (
    Batch,
    LeftToGpu,
    Quarantine,
    Seed,
    StoredSample,
    drawn_shards,
    filled,
    left_to_gpu,
    numbered,
    repeated,
    samples_of_shards,
)
from training.data.slots import AHEAD, Slots, slots_for
from training.data.transforms import Shape, Transforms, TransformsOfEpoch
from training.data.validation import Validation
from training.ranks import Numbers, Ranks, part_of
from training.settings.data import DataSettings

os.environ["WDS_SECURE"] = "1"  # before webdataset is read: nothing in a name or a sample runs
import webdataset  # noqa: E402

TRAIN = "train"


class Data(Protocol):
    """A data set and a way to walk through it."""

    classes: tuple[str, ...]
    dataset: str
    """Name of the data set."""
    digest: str
    """The identity of the data set, whatever its name."""
    versions: dict[str, str]
    """The digest of each folder that is read, by its location."""
    epoch_steps: int
    """Steps that make an epoch."""
    batch: int
    """Samples of a full step, over all ranks: what its gradient is divided by."""
    remark: str
    """What a user should know about how the images are read, if anything."""
    rows: int
    """Rows of the training set's index."""
    has_evaluation: bool
    """True if there are validation samples."""
    lanes: int
    """Streams of a rank on which the order of its samples depends; 0: it follows from the seed."""
    cache: NodeCache
    """What is kept of the data on this node."""

    def class_sizes(self) -> Numbers:
        """Return the samples of each class in an epoch of training."""

    def samples_in(self, step: int) -> int:
        """Return the samples of this step over all ranks: fewer where an epoch ends exactly."""

    def cut(self, step: int) -> Cut:
        """Return how this step is cut among the ranks."""

    def recut(self, cut: Cut) -> None:
        """Cut the steps from one on otherwise (--balance auto)."""

    def among(self, ranks: Ranks) -> "Data":
        """Return the same steps, cut for other ranks (--elastic)."""

    def training(self, start: int) -> Iterator[Batch]:
        """Yield this rank's batches of every step from this one on, without end."""

    def evaluation(self) -> Iterator[Batch]:
        """Yield this rank's part of the validation samples: all ranks together have each once."""

    def grid(self, count: int, rows: Sequence[int] = ()) -> Batch | None:
        """Return validation images to look at: those of these rows, or some."""

    def close(self) -> None:
        """End what makes batches."""


def open_data(
    config: DataSettings,
    ranks: Ranks,
    transforms: TransformsOfEpoch,
    task: str,
    synthetic_classes: int,
) -> Data:
    """Return the data that the settings ask for; UsageError when they name none.

    `task` is its name, for the message; `synthetic_classes` are those of --synthetic.
    """
    if config.synthetic:
        return Synthetic(config, transforms(0), synthetic_classes, ranks)
    config.require_data(task)
    of_run = partial(_of_run, transforms, config.epochs)
    return (Planned if config.has_planned_order else Resampled)(config, ranks, of_run)


def _of_run(transforms: TransformsOfEpoch, epochs: int, epoch: int) -> Transforms:
    """Return the transforms of an epoch; those of the last one for what workers read beyond it.

    Such batches are never used, but must fit the memory of the others.
    """
    return transforms(min(epoch, epochs - 1))


class Resampled:
    """Shards drawn with replacement for training, every sample once for validation."""

    def __init__(self, config: DataSettings, ranks: Ranks, transforms: TransformsOfEpoch) -> None:
        self._source = opened(config)
        share_index(self._source, TRAIN, ranks)
        manifest = self._source.manifest
        self.classes = manifest.classes
        self.digest = manifest.digest
        self.versions = {self._source.location: manifest.digest}
        self.dataset = manifest.dataset
        self.batch = config.batch_size * ranks.world
        self.rows = manifest.split(TRAIN).samples
        self.epoch_steps = config.steps_per_epoch or max(self.rows // self.batch, 1)
        self._device = ranks.device
        self._decoder, self.remark = gpu_decoder(config, ranks, transforms(0), self._source)
        self._workers = worker_count(config, ranks)
        self.lanes = max(self._workers, 1)
        self._plan = DataPlan(
            config=config,
            source=self._source,
            transforms=transforms,
            rank=ranks.rank,
            world=ranks.world,
            epoch_steps=self.epoch_steps,
            lanes=self.lanes,
            on_gpu=self._decoder is not None,
        )
        self._validation = Validation(config, ranks, transforms, self._source)
        self.cache = NodeCache([self._source], (TRAIN, config.eval_split))
        self.cache.meet(ranks)
        self.has_evaluation = self._validation.has_evaluation

    def training(self, start: int) -> Iterator[Batch]:
        """Yield this rank's batches from a step on; a step's batch does not depend on `start`."""
        self._source.index(TRAIN)  # read here, it is there for all workers
        plan = replace(self._plan, start=start)
        slots = plan.slots(AHEAD * self._workers, self._device)
        made = loaded(ResampledStream(plan, slots), self._workers)
        return on_device((batch_in(slots, batch) for batch in made), self._device, self._decoder)

    def class_sizes(self) -> Numbers:
        """Return the samples of each class in the training set."""
        labels = self._source.index(TRAIN)["label"]
        return np.bincount(labels, minlength=len(self.classes))

    def samples_in(self, step: int) -> int:
        """Return the global batch, always."""
        return self.batch

    def cut(self, step: int) -> Cut:
        """Return the even cut, always."""
        return Cut.even(self._plan.world)

    def recut(self, cut: Cut) -> None:
        """Refuse: as `among` does."""
        raise NotImplementedError

    def among(self, ranks: Ranks) -> "Resampled":
        """Refuse: lanes belong to ranks, so that --elastic reads in a planned order."""
        raise NotImplementedError

    def evaluation(self) -> Iterator[Batch]:
        """Yield this rank's part of the validation set, in the order of the index."""
        return self._validation.batches()

    def grid(self, count: int, rows: Sequence[int] = ()) -> Batch | None:
        """Return validation images, those of these rows or at even distances."""
        return self._validation.grid(count, rows)

    def close(self) -> None:
        """Have nothing to end: workers end with the batches that they make."""


class Synthetic:
    """The same random images at every step: the loop without a loader."""

    def __init__(
        self, config: DataSettings, transforms: Transforms, classes: int, ranks: Ranks
    ) -> None:
        self._made_from = config, transforms, classes
        self.classes = tuple(f"class {number}" for number in range(classes))
        self.digest = self.dataset = "synthetic"
        self.versions: dict[str, str] = {}
        self.epoch_steps = config.steps_per_epoch or 100
        self.batch = config.global_batch or config.batch_size * ranks.world
        self.rows = self.batch
        self.has_evaluation = True
        self.lanes, self.remark = 0, ""
        self.cache = NodeCache((), ())
        self._ranks = ranks
        samples = len(part_of(ranks, self.batch)) if ranks.rank >= 0 else 0  # -1: in no group yet
        random = torch.Generator().manual_seed(config.seed + max(ranks.rank, 0))
        shape = (samples, transforms.size, transforms.size, transforms.channels)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=random)
        labels = torch.randint(classes, shape[:1], generator=random)
        batch = Batch(images.permute(0, 3, 1, 2), labels)
        self._batch = next(on_device(iter([batch]), ranks.device))

    def training(self, start: int) -> Iterator[Batch]:
        """Yield the one batch, without end."""
        while True:
            yield self._batch

    def class_sizes(self) -> Numbers:
        """Return one sample of each class: labels of noise are drawn evenly."""
        return np.ones(len(self.classes), np.int64)

    def samples_in(self, step: int) -> int:
        """Return the global batch, always."""
        return self.batch

    def cut(self, step: int) -> Cut:
        """Return the even cut, always."""
        return Cut.even(self._ranks.world)

    def recut(self, cut: Cut) -> None:
        """Refuse: the same images are in every step."""
        raise NotImplementedError

    def among(self, ranks: Ranks) -> "Synthetic":
        """Return as many images a step, cut for other ranks."""
        return Synthetic(*self._made_from, ranks)

    def evaluation(self) -> Iterator[Batch]:
        """Yield the one batch, once."""
        yield self._batch

    def grid(self, count: int, rows: Sequence[int] = ()) -> Batch | None:
        """Return None: noise is not worth a look."""
        return None

    def close(self) -> None:
        """Have nothing to end."""


@dataclass(frozen=True)
class DataPlan:
    """The settings that a lane needs to make its share of a rank's batches."""

    config: DataSettings
    source: Source
    transforms: TransformsOfEpoch
    rank: int
    world: int
    epoch_steps: int
    lanes: int
    start: int = 0
    on_gpu: bool = False
    """Whether JPEGs are left to the GPU."""

    @property
    def sharing(self) -> int:
        """Return how many ranks draw the same images."""
        return math.gcd(self.world, self.config.aug_repeats)

    @property
    def times(self) -> int:
        """Return how often a rank has a sample that it draws."""
        return self.config.aug_repeats // self.sharing

    @property
    def apart(self) -> int:
        """Return how many samples lie between two copies of one."""
        return max(self.config.batch_size // self.times, 1)

    def seed(self, epoch: int, lane: int) -> Seed:
        """Return what the changes to images in a lane's epoch follow from."""
        return self.config.seed, epoch, self.rank, lane

    def seed_of_draws(self, epoch: int, lane: int) -> Seed:
        """Return what the choice of images in a lane's epoch follows from."""
        return self.config.seed, epoch, self.rank // self.sharing, lane

    def slots(self, in_flight: int, device: torch.device) -> Slots:
        """Return memory for the rank's batches, of which workers have `in_flight` under way."""
        config = self.config
        return slots_for(config.batch_size, self.transforms, config.epochs, in_flight, device)

    def samples(self, epoch: int, lane: int) -> int:
        """Return how many samples a lane draws in an epoch, each of them for all its copies."""
        first = epoch * self.epoch_steps
        images = self.share(first, first + self.epoch_steps, lane) * self.config.batch_size
        return -(-images // (self.apart * self.times)) * self.apart

    def share(self, first: int, last: int, lane: int) -> int:
        """Return how many of the steps in [first, last) a lane makes: every `lanes`-th."""
        return (last - lane - 1) // self.lanes - (first - lane - 1) // self.lanes


class Filled(NamedTuple):
    """A batch that a loader worker has decoded into a slot."""

    number: int  # in the order in which the rank takes them
    shape: Shape
    labels: list[int]
    skipped: int
    left: list[LeftToGpu]


def batch_in(slots: Slots, made: Filled) -> Batch:
    """Return the batch that lies in a slot."""
    images = slots.images(made.number, len(made.labels), made.shape).permute(0, 3, 1, 2)
    labels = slots.labels(made.number, np.array(made.labels, np.int64))
    return Batch(images, labels, made.skipped, left=made.left)


class ResampledStream(IterableDataset[Filled | Problem]):
    """A rank's endless stream of training batches, made by its lanes in turn.

    A lane starts afresh at every epoch, and reads the samples that it uses in it, no others. Where
    a run resumes in the middle of an epoch, the lane walks again through the samples already used,
    without decoding them.
    """

    def __init__(self, plan: DataPlan, slots: Slots) -> None:
        self.plan = plan
        self.slots = slots

    def __iter__(self) -> Iterator[Filled | Problem]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        lane = (self.plan.start + number) % self.plan.lanes
        return with_problems(self._lane(lane, count(number, workers)))

    def _lane(self, lane: int, numbers: Iterator[int]) -> Iterator[Filled]:
        plan, quarantine = self.plan, Quarantine(self.plan.config)
        step = plan.start
        while True:
            epoch = step // plan.epoch_steps
            first, last = epoch * plan.epoch_steps, (epoch + 1) * plan.epoch_steps
            done = plan.share(first, step, lane)
            transforms, seed = plan.transforms(epoch), plan.seed(epoch, lane)
            shape, samples = transforms.training_shape, self._samples(epoch, lane, done)
            prepare = preparing(transforms, plan.on_gpu)
            for number in islice(numbers, plan.share(step, last, lane)):
                images = self.slots.images(number, plan.config.batch_size, shape)
                kept = filled(images, samples, prepare, seed, quarantine)
                labels, left = [one.label for one in kept], left_to_gpu(enumerate(kept))
                yield Filled(number, shape, labels, quarantine.news(), left)
            step = last

    def _samples(self, epoch: int, lane: int, done: int) -> Iterator[tuple[int, StoredSample]]:
        """Yield the numbered samples of a lane's epoch, from its batch number `done` on."""
        plan, config = self.plan, self.plan.config
        seed, sample_count = plan.seed_of_draws(epoch, lane), plan.samples(epoch, lane)
        pipeline = webdataset.DataPipeline(
            partial(drawn_shards, plan.source, TRAIN, seed),
            partial(samples_of_shards, plan.source, TRAIN, sample_count=sample_count),
            partial(shuffled, sample_count=sample_count, buffer=config.shuffle_buffer, seed=seed),
            partial(repeated, times=plan.times, apart=plan.apart),
            partial(numbered, first=done * config.batch_size),
        )
        return cast(Iterator[tuple[int, StoredSample]], iter(pipeline))


def shuffled(
    samples: Iterator[StoredSample], sample_count: int, buffer: int, seed: Seed
) -> Iterator[StoredSample]:
    """Yield samples by a shuffle buffer, which is used up after the first `sample_count` of them.

    Further ones, in place of samples that are left out, follow as they come.
    """
    shuffle = webdataset.shuffle(buffer, initial=buffer // 10, rng=random.Random(str(seed)))
    yield from shuffle(islice(samples, sample_count))
    yield from samples
