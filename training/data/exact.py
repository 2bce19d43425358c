"""Read samples in a planned order: in exact epochs each once, for any number of ranks and workers.

The position of a run is one integer, the step. A loader worker of a rank finds by itself what it
reads: it knows the order of each epoch (training.data.order), and its own part of each step. So it
goes through all epochs of the run:

    parts     ReaderPart: what this worker reads in some steps
    ahead     {row: StoredSample}: a verified read of neighbours; threads fetch the next
    steps     StepSamples: this worker's samples of a step
    shares    Share: the same decoded, with their indices in the rank's batch

In the rank:

    batches   Batch: the shares of a step, which lie in one slot in the planned order

The transforms of a sample follow from seed, epoch and its position in the epoch: not from the
rank, the worker, or where the run was interrupted.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count, islice, pairwise, tee
from typing import NamedTuple
from weakref import proxy

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info

from rackrun.errors import Problem
from rackrun.training.data.loader import loaded, with_problems
from rackrun.training.data.mixture import Mixture
from rackrun.training.data.order.cut import MOST_SHARE, Cut
from rackrun.training.data.order.epoch import EpochOrder, Positions, resampled, shuffled
from rackrun.training.data.order.reading import Reader, ReaderPart, Reading
from rackrun.training.data.order.shared import SharedOrder
from rackrun.training.data.pool import SamplePool
from rackrun.training.data.samples import Batch, Quarantine, StoredSample, filled
from rackrun.training.data.slots import Slots, slots_for
from rackrun.training.data.transforms import Shape, TransformsOfEpoch
from rackrun.training.settings.data import DataSettings

READS_AHEAD = 16  # of at most 2 MiB, per loader worker
READERS = 4  # threads per loader worker; they wait for a disk or a server


@dataclass(frozen=True)
class StepPlan:
    """The steps of a run over a pool of samples, the same for all ranks.

    `step // epoch_steps` is the epoch, and within an epoch each step takes the next `batch` samples
    of the order, the last one the rest.
    """

    config: DataSettings
    pool: SamplePool
    mixture: Mixture
    transforms: TransformsOfEpoch
    batch: int  # samples per step, over all ranks
    orders: SharedOrder = field(default_factory=SharedOrder)

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

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""
        index, rows, seed = self.pool.index, self.mixture.rows(epoch), self.config.seed
        if self.config.exact_epochs:
            return shuffled(index, rows, seed, epoch, self.batch)
        return resampled(index, rows, seed, epoch, self.batch, self.epoch_steps)

    def largest_part(self, world: int) -> int:
        """Return the samples of the largest batch that one of so many ranks may get."""
        even = -(-self.batch // world)
        return min(self.batch, even * MOST_SHARE) if self.config.balance == "auto" else even

    def slots(self, world: int, in_flight: int, device: torch.device) -> Slots:
        """Return memory for a rank's batches, of which workers have `in_flight` under way."""
        largest, epochs = self.largest_part(world), self.config.epochs
        return slots_for(largest, self.transforms, epochs, in_flight, device)

    def parts(self, step: int, reader: Reader) -> Iterator[tuple[int, ReaderPart]]:
        """Yield what a loader worker reads from a step on, epoch after epoch, part by part."""
        begun, first = divmod(step, self.epoch_steps)
        # Without end: workers read on into the next epoch while the last batches of this one train.
        for epoch in count(begun):
            start = first * self.batch if epoch == begun else 0
            for part in self._reading(epoch, start, reader).parts():
                yield epoch, part

    def _reading(self, epoch: int, start: int, reader: Reader) -> Reading:
        # A method of its own: no frame of `parts` keeps the shared memory mapped for an epoch.
        with self.orders.of(epoch, self.order) as order:
            return Reading(order, start, self.batch, reader)


@dataclass(frozen=True)
class Assignment:
    """What the loader workers of a rank make, and where it goes."""

    rank: int
    cut: Cut  # of the first steps
    start: int  # the first step
    slots: Slots


class Share(NamedTuple):
    """The samples of a step that one loader worker has decoded into a slot."""

    number: int  # of the batch that they are a part of
    shape: Shape
    labels: npt.NDArray[np.int64]  # (n,)
    batch_indices: Positions  # (n,): which image of the slot each sample is
    rows: Positions  # (n,): in the index
    left_out: list[str]  # bad samples
    keys: list[tuple[str, str]]  # shard and key of each


class Feed:
    """The loader workers of a rank, and what steps are cut otherwise meanwhile."""

    def __init__(self, plan: StepPlan, assignment: Assignment, workers: int) -> None:
        self._assignment = assignment
        self._makers = max(workers, 1)  # of shares: without workers, the rank itself
        self._requested = 0  # shares
        self._cuts: dict[int, Cut] = {}  # by the first step that is cut so
        # A proxy: a cycle of references would keep an abandoned feed and its workers alive.
        requests = Feed._requests(proxy(self))
        self._shares = loaded(ExactShares(plan, assignment), workers, requests=requests)

    def batches(self) -> Iterator[Batch]:
        """Yield the batch of each step: a share of every worker, in turn."""
        of_step = list[Share]()
        # DataLoader takes items from its workers in turn: one of each, in a row, makes a step.
        for share in self._shares:
            of_step.append(share)
            if len(of_step) == self._makers:
                yield in_order(of_step, self._assignment.slots)
                of_step.clear()

    def recut(self, cut: Cut) -> None:
        """Cut steps otherwise from `cut.step` on; no worker may have a request for them yet."""
        # A share that a worker has begun stays cut as it was: its batch would not be whole.
        assert self._requested <= (cut.step - self._assignment.start) * self._makers, "too late"
        self._cuts[cut.step] = cut

    def _requests(self) -> Iterator[Cut | None]:
        """Yield the new cut for the next share of each worker in turn: mostly none.

        DataLoader sends each worker up to AHEAD requests before it takes their shares.
        """
        while True:
            turn, self._requested = self._requested // self._makers, self._requested + 1
            yield self._cuts.get(self._assignment.start + turn)

    def close(self) -> None:
        """End the workers."""
        self._shares.close()


class StepSamples(NamedTuple):
    """The samples of a step that one loader worker has read, in the order of their use."""

    epoch: int
    rows: Positions  # (n,): in the index
    positions: Positions  # (n,): in the epoch
    batch_indices: Positions  # (n,): in the rank's batch
    stored: list[StoredSample]


class ExactShares(Dataset[Share | Problem]):
    """The shares that one loader worker makes, in the order of their steps.

    An item is whatever comes next. The index that DataLoader sends is the cut from this share on,
    where that changes.
    """

    def __init__(self, plan: StepPlan, assignment: Assignment) -> None:
        self.plan = plan
        self._assignment = assignment
        self._cut = assignment.cut  # of the next share
        self._shares: Generator[Share | Problem] | None = None

    def __getitem__(self, cut: Cut | None) -> Share | Problem:
        self._cut = cut or self._cut
        if not self._shares:  # here, in the worker
            self._shares = with_problems(self._shares_of(self._assignment))
        return next(self._shares)

    def _shares_of(self, assignment: Assignment) -> Iterator[Share]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        plan, quarantine = self.plan, Quarantine(self.plan.config)
        step = assignment.start
        while True:
            cut = self._cut
            reader = Reader(assignment.rank, cut, worker, workers)
            # One copy of the plan feeds the threads that read ahead, the other the decoding.
            parts, same_parts = tee(plan.parts(step, reader))
            reads = (read for _, part in same_parts for read in part.reads.tolist())
            with closing(ahead(plan.pool.read, reads)) as arriving:
                samples_of_steps = steps(parts, arriving)
                # Under another cut this worker has other lanes: what it read ahead is dropped.
                while self._cut == cut:
                    number = step - assignment.start
                    yield _share(plan, assignment, number, next(samples_of_steps), quarantine)
                    step += 1


def _share(
    plan: StepPlan, assignment: Assignment, number: int, step: StepSamples, quarantine: Quarantine
) -> Share:
    transforms, seed = plan.transforms(step.epoch), (plan.config.seed, step.epoch)
    shape, largest = transforms.training_shape, plan.largest_part(assignment.cut.world)
    images = assignment.slots.images(number, largest, shape)
    samples = zip(step.positions.tolist(), step.stored, strict=True)
    # Straight into the slot of the rank's batch, of which other workers fill the other images.
    prepare, batch_indices = transforms.prepared_for_training, step.batch_indices.tolist()
    kept = filled(images, samples, prepare, seed, quarantine, batch_indices)
    is_kept = np.isin(step.batch_indices, [sample.batch_index for sample in kept])
    return Share(
        number,
        shape,
        np.array([sample.label for sample in kept], np.int64),
        step.batch_indices[is_kept],
        step.rows[is_kept],
        quarantine.news(),
        [(sample.shard, sample.key) for sample in kept],
    )


def steps(
    parts: Iterator[tuple[int, ReaderPart]], arriving: Iterator[dict[int, StoredSample]]
) -> Iterator[StepSamples]:
    """Yield this worker's samples of each step, out of the reads that arrive in this order."""
    waiting = dict[int, dict[int, StoredSample]]()  # by read: what came and is not used yet, by row
    for epoch, part in parts:
        for edges in pairwise([0, *part.ends.tolist()]):
            span = slice(*edges)
            rows, positions = part.rows[span], part.positions[span]
            stored = []
            columns = rows.tolist(), positions.tolist(), part.brought_by[span].tolist()
            for row, position, brought_by in zip(*columns, strict=True):
                # A read is kept until its last sample is used: neighbours are steps apart.
                if position == brought_by:
                    waiting[brought_by] = next(arriving)
                stored.append(waiting[brought_by].pop(row))
                if not waiting[brought_by]:
                    del waiting[brought_by]
            yield StepSamples(epoch, rows, positions, part.batch_indices[span], stored)


def ahead(
    read: Callable[[int, int], dict[int, StoredSample]], reads: Iterator[tuple[int, int]]
) -> Generator[dict[int, StoredSample]]:
    """Yield the results of these reads in order, while threads work on the next ones."""
    threads = ThreadPoolExecutor(READERS)
    futures = deque(threads.submit(read, *which) for which in islice(reads, READS_AHEAD))
    try:
        while futures:
            result = futures.popleft().result()
            # One more is asked for as each is taken: READS_AHEAD bounds the memory held.
            futures.extend(threads.submit(read, *which) for which in islice(reads, 1))
            yield result
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # a read may wait for a server for long


def in_order(shares: list[Share], slots: Slots) -> Batch:
    """Return the shares of a step as one batch, in the order of their indices."""
    batch_indices = np.concatenate([share.batch_indices for share in shares])
    order = batch_indices.argsort()
    number, stored = shares[0].number, int(batch_indices.max(initial=-1)) + 1
    images = slots.images(number, stored, shares[0].shape)
    if stored > len(batch_indices):  # there are gaps where samples were left out
        images = images[torch.from_numpy(batch_indices[order])]
    keys = [key for share in shares for key in share.keys]
    return Batch(
        images.permute(0, 3, 1, 2),
        slots.labels(number, np.concatenate([share.labels for share in shares])[order]),
        [name for share in shares for name in share.left_out],
        torch.from_numpy(np.concatenate([share.rows for share in shares])[order]),
        keys=[keys[position] for position in order.tolist()],
    )
