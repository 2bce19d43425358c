"""Exact epochs: every sample once, at any number of ranks and loader workers.

In each loader worker of a rank, through all epochs of the run:

    parts     Part: what this worker reads of an epoch (training.data.order)
    ahead     {row: Found}: one read of neighbours in a shard, verified; threads fetch the next
    shares    Share: this worker's samples of a step, with their places in the rank's batch

In the rank:

    merged    Batch: the shares of a step, side by side in the planned order

The transforms of a sample follow from seed, epoch and its position in the epoch: not from the
rank, the worker, or where the run was interrupted.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, islice, tee
from typing import NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from rackrun.errors import Problem, UsageError
from training.config import DataSettings
from training.data.loader import loaded, on_device, worker_count
from training.data.mixture import Mixture
from training.data.order import Order, Part, resampled, shuffled
from training.data.order import part as reader_part
from training.data.pool import SamplePool, training_mixture, training_pool
from training.data.samples import Batch, Quarantine, Seed, StoredSample, as_batch, decoded
from training.data.transforms import Transforms, TransformsOfEpoch
from training.data.validation import Validation
from training.ranks import Ranks

READS_AHEAD = 16  # of at most 2 MiB, per loader worker
READERS = 4  # threads per loader worker; they wait for a disk or a server


class Share(NamedTuple):
    """The samples of a step that one loader worker made."""

    images: torch.Tensor  # uint8 (n, channels, size, size)
    labels: torch.Tensor  # int64 (n,)
    places: torch.Tensor  # int32 (n,): in the rank's batch
    rows: torch.Tensor  # int32 (n,): in the index
    skipped: int


class Planned:
    """Training in a planned order, and every sample once for validation.

    The plan is exact epochs or, where only some samples are chosen, blocks of these drawn with
    replacement, for epochs of as many whole steps as they fill.
    """

    def __init__(self, config: DataSettings, ranks: Ranks, transforms: TransformsOfEpoch) -> None:
        self.batch = config.global_batch or config.batch_size * ranks.world
        if self.batch < ranks.world:
            raise UsageError(
                f"--global-batch {self.batch} has not a sample for each of {ranks.world} ranks"
            )
        pool = training_pool(config)
        self._walk = Walk(
            config=config,
            pool=pool,
            mixture=training_mixture(config, pool),
            transforms=transforms,
            batch=self.batch,
            rank=ranks.rank,
            world=ranks.world,
        )
        self.classes = pool.classes
        self.rows = pool.index.size
        self.digest = pool.digest(config)
        self.dataset = pool.sources[0].manifest.dataset
        self.epoch_steps = self._walk.epoch_steps
        self._validation = Validation(config, ranks, transforms, pool.sources[0])
        self.judges = self._validation.judges
        self._device = ranks.device
        self._workers = worker_count(config, ranks)

    def training(self, start: int) -> Iterator[Batch]:
        """Yield this rank's batches from a step on."""
        stream = ExactStream(replace(self._walk, start=start))
        made = loaded(stream, self._workers, self._device)
        return on_device(merged(made, self._workers, self._device), self._device)

    def samples_in(self, step: int) -> int:
        """Return the samples of this step over all ranks: the last of an epoch has the rest."""
        return self._walk.samples_in(step)

    def evaluation(self) -> Iterator[Batch]:
        """Yield this rank's part of the validation set."""
        return self._validation.batches()

    def grid(self, count: int) -> Batch | None:
        """Return validation images at even distances."""
        return self._validation.grid(count)


@dataclass(frozen=True)
class Walk:
    """The steps of a run over a pool of samples, and the way of one rank through them.

    The position of a run is one integer, the step: `step // epoch_steps` is the epoch, and within
    an epoch each step takes the next `batch` samples of the order, the last one the rest.
    """

    config: DataSettings
    pool: SamplePool
    mixture: Mixture
    transforms: TransformsOfEpoch
    batch: int  # samples per step, over all ranks
    rank: int
    world: int
    start: int = 0

    @property
    def epoch_steps(self) -> int:
        """Steps that make an epoch."""
        if self.config.exact_epochs:
            return -(-self.mixture.samples // self.batch)
        return self.config.steps_per_epoch or max(self.mixture.samples // self.batch, 1)

    def samples_in(self, step: int) -> int:
        """Return the number of samples of a step over all ranks."""
        if not self.config.exact_epochs:
            return self.batch
        return min(self.batch, self.mixture.samples - step % self.epoch_steps * self.batch)

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch."""
        index, rows, seed = self.pool.index, self.mixture.rows(epoch), self.config.seed
        if self.config.exact_epochs:
            return shuffled(index, rows, seed, epoch, self.batch)
        return resampled(index, rows, seed, epoch, self.batch, self.epoch_steps)

    def parts(self, worker: int, workers: int) -> Iterator[tuple[int, Part]]:
        """Yield the part that a loader worker reads of each epoch, without end."""
        begun, first = divmod(self.start, self.epoch_steps)
        place = (self.rank, self.world, worker, workers)
        for epoch in count(begun):
            start = first * self.batch if epoch == begun else 0
            order = self.order(epoch)
            yield epoch, reader_part(order, self.pool.index, start, self.batch, *place)


class ExactStream(IterableDataset[Share | Problem]):
    """The shares of a rank's loader workers: one per worker and step, in turn."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk

    def __iter__(self) -> Iterator[Share | Problem]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        try:
            yield from self._shares(number, workers)
        except Problem as problem:  # as a value it reaches the loop without a worker's traceback
            yield problem

    def _shares(self, worker: int, workers: int) -> Iterator[Share]:
        walk, quarantine = self.walk, Quarantine(self.walk.config)
        parts, same_parts = tee(walk.parts(worker, workers))
        reads = (read for _, part in same_parts for read in part.reads.tolist())
        with closing(ahead(walk.pool.read, reads)) as arriving:
            for epoch, part in parts:
                chances = (walk.config.seed, epoch)
                yield from shares(part, arriving, walk.transforms(epoch), chances, quarantine)


def shares(
    part: Part,
    arriving: Iterator[dict[int, StoredSample]],
    transforms: Transforms,
    chances: Seed,
    quarantine: Quarantine,
) -> Iterator[Share]:
    """Yield the steps of a part, each with the samples that this worker has in it."""
    waiting: dict[
        int, dict[int, StoredSample]
    ] = {}  # by read: what came and is not yet used, by row
    arrived = begin = 0
    for end in part.ends.tolist():
        here = slice(begin, end)
        begin = end
        found = []
        for row, position, read in zip(
            part.rows[here].tolist(),
            part.positions[here].tolist(),
            part.brought_by[here].tolist(),
            strict=True,
        ):
            if read == arrived:  # reads are numbered in the order of first use
                waiting[read] = next(arriving)
                arrived += 1
            found.append((position, waiting[read].pop(row)))
            if not waiting[read]:
                del waiting[read]
        samples = [
            list(decoded([item], transforms.for_training, chances, quarantine)) for item in found
        ]
        kept = torch.tensor([bool(sample) for sample in samples], dtype=torch.bool)
        images, labels = as_batch([sample for one in samples for sample in one])[:2]
        if not len(labels):
            images = images.new_empty((0, transforms.channels, transforms.size, transforms.size))
        yield Share(
            images,
            labels,
            torch.from_numpy(part.places[here])[kept],
            torch.from_numpy(part.rows[here])[kept],
            quarantine.news(),
        )


def ahead(
    read: Callable[[int, int], dict[int, StoredSample]], reads: Iterator[tuple[int, int]]
) -> Generator[dict[int, StoredSample]]:
    """Yield the results of these reads in order, while threads work on the next ones."""
    with ThreadPoolExecutor(READERS) as threads:
        futures = deque(threads.submit(read, *which) for which in islice(reads, READS_AHEAD))
        try:
            while futures:
                result = futures.popleft().result()
                futures.extend(threads.submit(read, *which) for which in islice(reads, 1))
                yield result
        finally:
            for future in futures:
                future.cancel()


def merged(made: Iterator[Share], workers: int, device: torch.device) -> Iterator[Batch]:
    """Yield the batches of a rank, put together on the device from its workers' shares."""
    while together := list(islice(made, max(workers, 1))):
        yield side_by_side(together, device)


def side_by_side(together: list[Share], device: torch.device) -> Batch:
    """Return the shares of a step as one batch, in the order of their places."""
    if len(together) == 1:
        images, labels, _, rows, skipped = together[0]
        images = images.to(device, non_blocking=True)
        return Batch(images, labels.to(device, non_blocking=True), skipped, rows)
    in_order = torch.cat([share.places for share in together]).argsort()
    slots = torch.split(in_order.argsort(), [len(share.places) for share in together])
    channels, *size = together[0].images.shape[1:]
    images = torch.empty((len(in_order), *size, channels), dtype=torch.uint8, device=device)
    for share, slot in zip(together, slots, strict=True):
        lay(images, slot, share.images.permute(0, 2, 3, 1))
    return Batch(
        images.permute(0, 3, 1, 2),
        torch.cat([share.labels for share in together])[in_order].to(device, non_blocking=True),
        sum(share.skipped for share in together),
        torch.cat([share.rows for share in together])[in_order],
    )


def lay(images: torch.Tensor, slots: torch.Tensor, part: torch.Tensor) -> None:
    """Copy images into these slots of a batch."""
    if images.is_cuda:
        images[slots.to(images.device, non_blocking=True)] = part.to(
            images.device, non_blocking=True
        )
    else:  # numpy copies whole images, torch byte by byte
        images.numpy()[slots.numpy()] = part.numpy()
