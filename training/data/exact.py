"""Exact epochs: every sample once, at any number of ranks and loader workers.

In each loader worker of a rank, through all epochs of the run, for one Assignment after another:

    parts     ReaderPart: what this worker reads in some steps (training.data.order)
    ahead     {row: StoredSample}: a verified read of neighbours; threads fetch the next
    shares    Share: this worker's samples of a step, with their indices in the rank's batch

In the rank:

    batches   Batch: the shares of a step, which lie in one slot in the planned order

The transforms of a sample follow from seed, epoch and its position in the epoch: not from the
rank, the worker, or where the run was interrupted.
"""

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count, islice, tee
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info

from rackrun.errors import Problem, UsageError
from training.data.gpu_decode import gpu_decoder, preparing
from training.data.loader import loaded, on_device, with_problems, worker_count
from training.data.mixture import Mixture
from training.data.node_cache import NodeCache
from training.data.order.blocks import resampled, rows_by_label, shuffled
from training.data.order.cut import MOST_SHARE, Cut
from training.data.order.epoch import EpochOrder, Positions
from training.data.order.reading import Reader, ReaderPart, Reading
from training.data.order.shared import SharedOrder
from training.data.pool import SamplePool, share_index, training_mixture, training_pool
from training.data.samples import (
    Batch,
    Kept,
    LeftToGpu,
    Quarantine,
    StoredSample,
    left_to_gpu,
    next_group,
    prepared_sample,
)
from training.data.slots import AHEAD, Slots, slots_for
from training.data.transforms import Shape, TransformsOfEpoch
from training.data.validation import Validation
from training.ranks import Numbers, Ranks
from training.settings.data import DataSettings

READS_AHEAD = 16  # of at most 2 MiB, per loader worker
READERS = 4  # threads per loader worker; they wait for a disk or a server


class Assignment(NamedTuple):
    """What the loader workers of a rank make from now on, and where it goes."""

    number: int  # of this assignment
    rank: int
    cut: Cut  # of the first steps
    start: int  # the first step
    slots: Slots


class Share(NamedTuple):
    """The samples of a step that one loader worker has decoded into a slot."""

    assignment: int  # the number of the one that it belongs to
    number: int  # of the batch that they are a part of
    shape: Shape
    labels: npt.NDArray[np.int64]  # (n,)
    batch_indices: Positions  # (n,): which image of the slot each sample is
    rows: Positions  # (n,): in the index
    skipped: int
    left: list[LeftToGpu]


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
        # From here on ranks exchange: all of them come through these lines in this order.
        for source in pool.sources:
            share_index(source, pool.split, ranks)
        self._decoder, self.remark = gpu_decoder(config, ranks, transforms(0), pool.sources[0])
        self._walk = Walk(
            config=config,
            pool=pool,
            mixture=training_mixture(config, pool),
            transforms=transforms,
            batch=self.batch,
            rank=ranks.rank,
            world=ranks.world,
            on_gpu=self._decoder is not None,
        )
        self.classes = pool.classes
        self.rows = pool.index.size
        self.digest = pool.digest(config)
        self.versions = pool.versions
        self.dataset = pool.sources[0].manifest.dataset
        self.epoch_steps = self._walk.epoch_steps
        self._validation = Validation(config, ranks, transforms, pool.sources[0])
        self.cache = NodeCache(pool.sources, (pool.split, config.eval_split))
        self.cache.meet(ranks)
        self.has_evaluation = self._validation.has_evaluation
        self.lanes = 0
        self._device = ranks.device
        self._workers = worker_count(config, ranks)
        self._cuts = [Cut.even(ranks.world)]
        self._feed = Feed(self._walk, self._workers)

    def cut(self, step: int) -> Cut:
        """Return how this step is cut among the ranks."""
        return next(cut for cut in reversed(self._cuts) if cut.step <= step)

    def recut(self, cut: Cut) -> None:
        """Cut steps otherwise, from one on that no loader worker can have begun (see LEAD)."""
        self._cuts.append(cut)
        self._feed.recut(cut)

    def among(self, ranks: Ranks) -> "Planned":
        """Return the same steps, cut for other ranks; loader workers stay, with what they know."""
        planned = copy.copy(self)
        planned._walk = replace(self._walk, rank=ranks.rank, world=ranks.world)
        planned._cuts = [Cut.even(ranks.world)]
        planned._validation = self._validation.among(ranks)
        planned.cache.meet(ranks)
        return planned

    def training(self, start: int) -> Iterator[Batch]:
        """Yield this rank's batches from a step on, in place of those that were asked for before.

        Workers that are there already go on with them.
        """
        slots = self._walk.slots(AHEAD if self._workers else 0, self._device)
        batches = self._feed.batches(self._walk.rank, self.cut(start), start, slots)
        return on_device(batches, self._device, self._decoder)

    def close(self) -> None:
        """End the loader workers."""
        self._feed.close()

    def class_sizes(self) -> Numbers:
        """Return the samples of each class that the first epoch draws."""
        walk = self._walk
        return rows_by_label(walk.pool.index, walk.mixture.rows(0), len(self.classes))

    def samples_in(self, step: int) -> int:
        """Return the samples of this step over all ranks: the last of an epoch has the rest."""
        return self._walk.samples_in(step)

    def evaluation(self) -> Iterator[Batch]:
        """Yield this rank's part of the validation set."""
        return self._validation.batches()

    def grid(self, count: int, rows: Sequence[int] = ()) -> Batch | None:
        """Return validation images, those of these rows or at even distances."""
        return self._validation.grid(count, rows)


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
    on_gpu: bool = False  # whether JPEGs are left to the GPU
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

    @property
    def largest(self) -> int:
        """Samples of the largest batch that this rank may get."""
        even = -(-self.batch // self.world)
        return min(self.batch, even * MOST_SHARE) if self.config.balance == "auto" else even

    def slots(self, in_flight: int, device: torch.device) -> Slots:
        """Return memory for the rank's batches, of which workers have `in_flight` under way."""
        return slots_for(self.largest, self.transforms, self.config.epochs, in_flight, device)

    def parts(self, step: int, reader: Reader) -> Iterator[tuple[int, ReaderPart]]:
        """Yield what a loader worker reads from a step on, epoch after epoch, part by part."""
        begun, first = divmod(step, self.epoch_steps)
        # Without end: workers read on into the next epoch while the last batches of this one train.
        for epoch in count(begun):
            start = first * self.batch if epoch == begun else 0
            for part in self._reading(epoch, start, reader).parts():
                yield epoch, part

    def _reading(self, epoch: int, start: int, reader: Reader) -> Reading:
        with self.orders.of(epoch, self.order) as order:
            return Reading(order, start, self.batch, reader)


class Feed:
    """The loader workers of a rank, which follow one assignment after another."""

    def __init__(self, walk: Walk, workers: int) -> None:
        self._walk = walk
        self._workers = workers
        self._makers = max(workers, 1)  # of shares: without workers, the rank itself
        self._requests = Requests(self._makers)
        self._made: Generator[Share] | None = None
        self._number = 0

    def batches(self, rank: int, cut: Cut, start: int, slots: Slots) -> Iterator[Batch]:
        """Yield the batch of each step from `start` on: a share of every worker, in turn."""
        self._number += 1
        assignment = Assignment(self._number, rank, cut, start, slots)
        self._requests.assign(assignment)
        if not self._made:
            self._made = loaded(ExactShares(self._walk), self._workers, requests=self._requests)
        shares = list[Share]()  # of a step
        # DataLoader takes items from its workers in turn: one of each, in a row, makes a step.
        for share in self._made:
            if share.assignment == assignment.number:  # else it was asked for before
                shares.append(share)
            if len(shares) == self._makers:
                yield in_order(shares, slots)
                shares.clear()

    def recut(self, cut: Cut) -> None:
        """Tell the workers how steps are cut that they have not been asked for yet."""
        self._requests.recut(cut)

    def close(self) -> None:
        """End the workers."""
        if self._made:
            self._made.close()


class Requests:
    """What each loader worker is asked for, in turn: its next share, of another assignment first.

    The first ones of an assignment must be asked for between two steps, when all workers have been
    asked equally often.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._assignment: Assignment | None = None
        self._asked = 0  # shares of the assignment
        self._cuts: dict[int, Cut] = {}

    def assign(self, assignment: Assignment) -> None:
        """Tell each worker of an assignment with its next request."""
        self._assignment, self._asked = assignment, 0
        self._cuts.clear()

    def recut(self, cut: Cut) -> None:
        """Tell each worker of a cut with the request for the first step that is cut so."""
        if self._assignment:
            # A share that a worker has begun stays cut as it was: its batch would not be whole.
            assert self._asked <= (cut.step - self._assignment.start) * self._workers, "too late"
        self._cuts[cut.step] = cut

    def __iter__(self) -> Iterator[Assignment | Cut | None]:
        while True:  # DataLoader asks AHEAD items of each worker before it gets the first
            turn, self._asked = self._asked // self._workers, self._asked + 1
            assert self._assignment
            yield self._cuts.get(self._assignment.start + turn) if turn else self._assignment


class ExactShares(Dataset[Share | Problem]):
    """The shares that one loader worker makes, in the order of their steps."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self._cut = Cut.even(walk.world)  # of the next share
        self._shares: Generator[Share | Problem] | None = None

    def __getitem__(self, request: Assignment | Cut | None) -> Share | Problem:
        if isinstance(request, Assignment):
            if self._shares:
                self._shares.close()
            self._shares = with_problems(self._made(request))
        self._cut = request.cut if isinstance(request, Assignment) else request or self._cut
        assert self._shares
        return next(self._shares)

    def _made(self, assignment: Assignment) -> Iterator[Share]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        walk = replace(self.walk, rank=assignment.rank, world=assignment.cut.world)
        quarantine, numbers = Quarantine(walk.config), count()
        step = assignment.start
        while True:
            cut = self._cut
            reader = Reader(walk.rank, cut, worker, workers)
            # One copy of the plan feeds the threads that read ahead, the other the decoding.
            parts, same_parts = tee(walk.parts(step, reader))
            reads = (read for _, part in same_parts for read in part.reads.tolist())
            with closing(ahead(walk.pool.read, reads)) as arriving:
                planned = steps(parts, arriving)
                # Under another cut this worker has other lanes: what it read ahead is dropped.
                while self._cut == cut:
                    yield _share(walk, assignment, next(numbers), *next(planned), quarantine)
                    step += 1


def _share(
    walk: Walk,
    assignment: Assignment,
    number: int,
    epoch: int,
    part: ReaderPart,
    step_slice: slice,
    stored_samples: list[StoredSample],
    quarantine: Quarantine,
) -> Share:
    """Decode this worker's samples of a step into the slot of the rank's batch."""
    transforms, seed = walk.transforms(epoch), (walk.config.seed, epoch)
    images = assignment.slots.images(number, walk.largest, transforms.training_shape).numpy()
    batch_indices, positions = part.batch_indices[step_slice], part.positions[step_slice]
    prepare = preparing(transforms, walk.on_gpu)
    prepared = (
        prepared_sample(position, stored, prepare, seed, quarantine)
        for position, stored in zip(positions.tolist(), stored_samples, strict=True)
    )
    # None keeps the place of a bad sample: those after it lie where the plan has put them.
    kept_or_none, indices = list[Kept | None](), iter(batch_indices.tolist())
    while group := next_group(prepared, len(stored_samples), quarantine):
        kept_or_none += [
            decoded and decoded.into(images[index])
            for decoded, index in zip(group, indices, strict=False)
        ]
        group.clear()  # the next one is decoded into the same memory
    is_kept = [kept is not None for kept in kept_or_none]
    return Share(
        assignment.number,
        number,
        transforms.training_shape,
        np.array([stored.sample.label for stored in stored_samples], np.int64)[is_kept],
        batch_indices[is_kept],
        part.rows[step_slice][is_kept],
        quarantine.news(),
        left_to_gpu(
            (batch_index, kept)
            for batch_index, kept in zip(batch_indices.tolist(), kept_or_none, strict=True)
            if kept
        ),
    )


def steps(
    parts: Iterator[tuple[int, ReaderPart]], arriving: Iterator[dict[int, StoredSample]]
) -> Iterator[tuple[int, ReaderPart, slice, list[StoredSample]]]:
    """Yield epoch and part of each step, where in it the step is, and this worker's samples."""
    waiting = dict[int, dict[int, StoredSample]]()  # by read: what came and is not used yet, by row
    for epoch, part in parts:
        begin = 0
        for end in part.ends.tolist():
            step_slice = slice(begin, end)
            begin = end
            columns = (part.rows, part.positions, part.brought_by)
            uses = zip(*(column[step_slice].tolist() for column in columns), strict=True)
            yield epoch, part, step_slice, [_taken(waiting, arriving, *use) for use in uses]


def _taken(
    waiting: dict[int, dict[int, StoredSample]],
    arriving: Iterator[dict[int, StoredSample]],
    row: int,
    position: int,
    brought_by: int,
) -> StoredSample:
    """Return a sample out of its read, which is the next to arrive if this is its first use."""
    # Kept until its last sample is used: neighbours of a shard are steps apart in the order.
    if position == brought_by:
        waiting[brought_by] = next(arriving)
    stored = waiting[brought_by].pop(row)
    if not waiting[brought_by]:
        del waiting[brought_by]
    return stored


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
    return Batch(
        images.permute(0, 3, 1, 2),
        slots.labels(number, np.concatenate([share.labels for share in shares])[order]),
        sum(share.skipped for share in shares),
        torch.from_numpy(np.concatenate([share.rows for share in shares])[order]),
        left=[jpeg for share in shares for jpeg in share.left],
    )
