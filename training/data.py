"""The ways to walk through a data set, put together from the links in training.pictures.

Training, resampled: each loader worker of each rank runs a chain of its own, a *lane*.

    drawn_shards -> found_in -> shuffle -> numbered -> decoded -> batched

Validation, complete: the ranks take neighbouring parts of the index, a part is cut into batches of
which only the last is short, and each batch is read by itself.

    rows_of -> decoded -> batched

Everything random is a function of (seed, epoch, rank, lane, number): the same run sees the same
pictures, also when it was interrupted. Batches leave the workers as uint8.
"""

import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from shards.errors import Problem, UsageError
from shards.source import Source, open_source
from training.config import Config
from training.decode import Pixels
from training.distributed import Ranks
from training.pictures import (
    Batch,
    Quarantine,
    Seed,
    as_batch,
    batched,
    decoded,
    drawn_shards,
    found_in,
    numbered,
    rows_of,
)
from training.preparation import Preparation
from training.task import Task

os.environ["WDS_SECURE"] = "1"  # before webdataset is read: nothing in a name or a sample runs
import webdataset  # noqa: E402

TRAIN, VALIDATION = "train", "val"


class Data(Protocol):
    """A data set and a way to walk through it."""

    classes: tuple[str, ...]
    digest: str
    """What the data set is, whatever it is called."""
    epoch_steps: int
    """Steps that make an epoch."""

    def training(self, start: int) -> Iterator[Batch]:
        """This rank's batches of every step from this one on, without end."""

    def evaluation(self) -> Iterator[Batch]:
        """This rank's part of the validation samples: all ranks together have each one once."""

    def grid(self, count: int) -> Batch | None:
        """Some validation pictures for people to look at."""


def open_data(task: Task, config: Config, ranks: Ranks) -> Data:
    """The data that the settings ask for; UsageError when they name none."""
    if config.synthetic:
        return Synthetic(config, task.preparation(config, 0), task.synthetic_classes, ranks)
    if not config.data:
        raise UsageError(
            f"no data: type --data FOLDER|URL (make it with `python -m convert {task.name}"
            " ARCHIVE FOLDER`), or --synthetic to measure speed"
        )
    return Resampled(task, config, ranks)


class Resampled:
    """Shards drawn with replacement for training, every sample once for validation."""

    def __init__(self, task: Task, config: Config, ranks: Ranks) -> None:
        card = open_source(config.data).card
        self.classes = card.classes
        self.digest = card.digest
        global_batch = config.batch_size * ranks.world
        samples = card.split(TRAIN).samples
        self.epoch_steps = config.steps_per_epoch or max(samples // global_batch, 1)
        self._device = ranks.device
        self._workers = worker_count(config, ranks)
        self._plan = Plan(
            config=config,
            preparation=partial(task.preparation, config),
            rank=ranks.rank,
            epoch_steps=self.epoch_steps,
            lanes=max(self._workers, 1),
        )
        total = card.split(VALIDATION).samples
        part = range(total * ranks.rank // ranks.world, total * (ranks.rank + 1) // ranks.world)
        self._evaluation = Rows(config, partial(task.preparation, config), part)
        self._total = total

    def training(self, start: int) -> Iterator[Batch]:
        """This rank's batches from a step on; a step's batch is the same wherever one started."""
        return self._loaded(ResampledStream(replace(self._plan, start=start)))

    def evaluation(self) -> Iterator[Batch]:
        """This rank's part of the validation set, in the order of the index."""
        return self._loaded(self._evaluation)

    def grid(self, count: int) -> Batch | None:
        """Validation pictures at even distances."""
        rows = sorted({self._total * number // count for number in range(count)})
        return self._evaluation.batch([range(row, row + 1) for row in rows])

    def _loaded(self, dataset: "Dataset[Batch | Problem]") -> Iterator[Batch]:
        return on_device(loaded(dataset, self._workers, self._device), self._device)


class Synthetic:
    """The same random pictures at every step: the loop without a loader."""

    def __init__(
        self, config: Config, preparation: Preparation, classes: int, ranks: Ranks
    ) -> None:
        self.classes = tuple(f"class {number}" for number in range(classes))
        self.digest = "synthetic"
        self.epoch_steps = config.steps_per_epoch or 100
        random = torch.Generator().manual_seed(config.seed + ranks.rank)
        shape = (config.batch_size, preparation.size, preparation.size, preparation.channels)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=random)
        labels = torch.randint(classes, shape[:1], generator=random)
        batch = Batch(images.permute(0, 3, 1, 2), labels)
        self._batch = next(on_device(iter([batch]), ranks.device))

    def training(self, start: int) -> Iterator[Batch]:
        """The one batch, for ever."""
        while True:
            yield self._batch

    def evaluation(self) -> Iterator[Batch]:
        """The one batch, once."""
        yield self._batch

    def grid(self, count: int) -> Batch | None:
        """Nothing: noise is not worth a look."""
        return None


@dataclass(frozen=True)
class Plan:
    """What a lane needs to know to make its share of a rank's batches."""

    config: Config
    preparation: Callable[[int], Preparation]  # of an epoch
    rank: int
    epoch_steps: int
    lanes: int
    start: int = 0

    def share(self, first: int, last: int, lane: int) -> int:
        """How many of the steps from first to last (without it) a lane makes: every lanes-th."""
        return (last - lane - 1) // self.lanes - (first - lane - 1) // self.lanes


class ResampledStream(IterableDataset[Batch | Problem]):
    """A rank's endless stream of training batches, made by its lanes in turn.

    A lane starts afresh at every epoch. Where a run goes on in the middle of one, the lane walks
    again through the samples that were used up, without decoding them.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[Batch | Problem]:
        worker = get_worker_info()
        lane = (self.plan.start + (worker.id if worker else 0)) % self.plan.lanes
        try:
            yield from self._lane(lane)
        except Problem as problem:  # as a value it reaches the loop without a worker's traceback
            yield problem

    def _lane(self, lane: int) -> Iterator[Batch]:
        plan, source = self.plan, open_source(self.plan.config.data)
        quarantine = Quarantine(plan.config)
        step = plan.start
        while True:
            epoch = step // plan.epoch_steps
            first, last = epoch * plan.epoch_steps, (epoch + 1) * plan.epoch_steps
            done = plan.share(first, step, lane)
            chain = self._chain(source, epoch, lane, done, quarantine)
            yield from islice(chain, plan.share(step, last, lane))
            step = last

    def _chain(
        self, source: Source, epoch: int, lane: int, done: int, quarantine: Quarantine
    ) -> Iterator[Batch]:
        config = self.plan.config
        seed: Seed = (config.seed, epoch, self.plan.rank, lane)
        prepare = self.plan.preparation(epoch).for_training
        pipeline = webdataset.DataPipeline(
            partial(drawn_shards, source, TRAIN, seed),
            partial(found_in, source, TRAIN),
            webdataset.shuffle(
                config.shuffle, initial=config.shuffle // 10, rng=random.Random(str(seed))
            ),
            partial(numbered, first=done * config.batch_size),
            partial(decoded, prepare=prepare, seed=seed, quarantine=quarantine),
            partial(batched, size=config.batch_size, quarantine=quarantine),
        )
        return cast(Iterator[Batch], iter(pipeline))


class Rows(Dataset[Batch | Problem]):
    """Some rows of the validation index, as batches that can be read in any order."""

    def __init__(
        self, config: Config, preparation: Callable[[int], Preparation], rows: range
    ) -> None:
        self.config = config
        self.preparation = preparation
        self.rows = rows

    def __len__(self) -> int:
        return -(-len(self.rows) // self.config.batch_size)

    def __getitem__(self, number: int) -> Batch | Problem:
        size = self.config.batch_size
        try:
            return self.batch([self.rows[number * size : (number + 1) * size]])
        except Problem as problem:
            return problem

    def batch(self, parts: list[range]) -> Batch:
        """One batch of neighbouring rows, or of several such parts."""
        found = (item for part in parts for item in rows_of(self._source, VALIDATION, part))
        pictures = decoded(enumerate(found), self._prepare, (), self._quarantine)
        return as_batch(list(pictures), self._quarantine.news())

    def _prepare(self, data: bytes, random: np.random.Generator) -> Pixels:
        return self.preparation(self.config.epochs - 1).for_evaluation(data)

    @cached_property
    def _source(self) -> Source:
        return open_source(self.config.data)

    @cached_property
    def _quarantine(self) -> Quarantine:
        return Quarantine(self.config)


def worker_count(config: Config, ranks: Ranks) -> int:
    """Loader workers of a rank: its share of the cores, most of which a CPU's model needs."""
    if config.workers >= 0:
        return config.workers
    cores = len(os.sched_getaffinity(0)) // ranks.local_world
    return max(1, min(cores - 1, 16) if ranks.device.type == "cuda" else cores // 4)


def loaded(
    dataset: "Dataset[Batch | Problem]", workers: int, device: torch.device
) -> Iterator[Batch]:
    """What a data set yields, made by worker processes; a worker's Problem is raised here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the user may ask for more than the cores
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=workers,
            worker_init_fn=_leave_signals_to_the_rank,
            collate_fn=_as_it_is,
            pin_memory=device.type == "cuda",
        )
    for item in loader:
        if isinstance(item, Problem):
            raise item
        yield item


def on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches on the device, one ahead of the step that works on them."""
    if device.type == "cpu":
        return batches
    return _copied_ahead(batches, device)


def _copied_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    ready: Batch | None = None
    for batch in batches:
        images, labels = (part.to(device, non_blocking=True) for part in batch[:2])
        if ready:
            yield ready
        ready = Batch(images, labels, batch.skipped)
    if ready:
        yield ready


def _as_it_is(item: Any) -> Any:
    return item


def _leave_signals_to_the_rank(worker: int) -> None:
    """A Ctrl-C reaches every process; the rank ends its step, and only then its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
