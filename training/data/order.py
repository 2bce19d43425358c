"""The order of exact epochs: which rows of the index each rank trains on in each step.

    EpochRows -> EpochOrder -> Steps, Cut -> Part: the rows of a rank in a step

The order is a function of seed, epoch and batch alone. It knows neither ranks nor loader workers,
so that all of them agree without an exchange, and a run resumes by the number of its step.

Rows lie in blocks of neighbors in a shard. An epoch puts the blocks in random order on a circle,
and spreads the samples of each over the OPEN blocks from there on. So every batch mixes samples of
that many blocks, while what is read in some minutes lies close together: on a disk, in a cache.

A step is the next `batch` rows of the order, and each rank has a part of them (`Cut`).
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 2 << 20
OPEN = 1024
"""Blocks that samples are mixed across at least: 2 GiB, over all ranks, for the page cache."""
MOST_SHARE = 3
"""Times of its even part that a rank gets at most, and that loader workers have memory for."""

Numbers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]


class WeightedRows(NamedTuple):
    """The rows of a class, in the order in which epochs draw them."""

    rows: Rows
    draws: int  # per epoch

    def copies(self, epoch: int) -> list[Rows]:
        """Return the rows that this epoch draws: first copies, second copies, …; all ascending."""
        walked = (epoch * self.draws + np.arange(self.draws)) % self.rows.size
        rounds = [walked[at : at + self.rows.size] for at in range(0, self.draws, self.rows.size)]
        return [np.sort(self.rows[each]) for each in rounds]


class EpochRows(NamedTuple):
    """The rows of every epoch."""

    once: Rows
    weighted: Sequence[WeightedRows] = ()

    @property
    def samples(self) -> int:
        """Samples per epoch, copies counted."""
        return self.once.size + sum(each.draws for each in self.weighted)

    def rows(self, epoch: int) -> Rows:
        """Return the rows of an epoch: ascending, once more from the start for each copy."""
        layers = [[self.once]]
        for each in self.weighted:
            for layer, rows in enumerate(each.copies(epoch)):
                if layer == len(layers):
                    layers.append([])
                layers[layer].append(rows)
        return np.concatenate([np.sort(np.concatenate(layer)) for layer in layers])


@dataclass(frozen=True)
class EpochOrder:
    """The order of the samples in each epoch."""

    index: npt.NDArray[np.void]
    epoch_rows: EpochRows
    seed: int
    batch: int
    """Samples of a step, over all ranks."""
    repeats: int = 1
    """How often an epoch has each of its images (--aug-repeats): a part of them, in turn."""

    @property
    def samples(self) -> int:
        """Samples of an epoch, copies counted."""
        return self._images * self.repeats

    @property
    def _images(self) -> int:
        return -(-self.epoch_rows.samples // self.repeats)

    def rows(self, epoch: int) -> Rows:
        """Return the row of every sample of an epoch."""
        turn, part = divmod(epoch, self.repeats)
        rows = self.epoch_rows.rows(turn)
        order = epoch_order(self.index, rows, self.seed, turn, self.batch)
        if self.repeats == 1:
            return order
        images = np.arange(part * self._images, (part + 1) * self._images)
        repeated = np.take(order, images, mode="wrap").repeat(self.repeats)
        # The copies of an image are in one step, and on different ranks, as torchvision has them.
        places = np.arange(repeated.size)
        return repeated[np.lexsort((places % self.repeats, places // self.batch))]


def epoch_order(index: npt.NDArray[np.void], rows: Rows, seed: int, epoch: int, batch: int) -> Rows:
    """Return these rows of the index in the order in which an epoch uses them.

    Rows ascend. Where they begin again, as for the second copies of samples, so do the blocks.
    """
    random = np.random.PCG64((seed, epoch)).random_raw  # of which numpy never changes a word
    starts = _block_starts(index, rows, shift=int(random() % BLOCK_BYTES))
    sizes = np.diff(starts, append=rows.size)
    places = np.argsort(random(sizes.size), kind="stable")
    block = np.repeat(np.arange(sizes.size), sizes)  # of each row
    mixed = np.lexsort((random(rows.size), block))  # the rows of each block in random order
    turn = np.empty(rows.size)
    turn[mixed] = np.arange(rows.size) - starts[block]
    turn += random(rows.size) / 2.0**64
    # At even distances, not anywhere: two neighbors then seldom meet in a batch.
    turn *= (min(max(OPEN, batch), sizes.size) / sizes)[block]
    return rows[np.argsort((places[block] + turn) % sizes.size, kind="stable")]


def _block_starts(index: npt.NDArray[np.void], rows: Rows, shift: int) -> Numbers:
    # The edges move from epoch to epoch, so that neighbors do not stay together for all training.
    ends = np.cumsum(index["length"][rows], dtype=np.int64) + shift
    begins = np.diff(ends // BLOCK_BYTES, prepend=-1) != 0
    begins |= np.diff(index["shard"][rows].astype(np.int64), prepend=-1) != 0
    begins |= np.diff(rows, prepend=-1) <= 0
    return np.flatnonzero(begins)


@dataclass(frozen=True)
class Cut:
    """How steps are cut among the ranks, from one step on: evenly, or in some proportion."""

    weights: tuple[int, ...]
    """By rank: in which proportion it gets what a step has beyond one sample for each."""
    step: int = 0
    """The first step that is cut so."""

    @classmethod
    def even(cls, world: int, step: int = 0) -> "Cut":
        """Return the cut in which the parts of a step differ by one sample at most."""
        return cls((1,) * world, step)

    @classmethod
    def into(cls, sizes: npt.ArrayLike, step: int = 0) -> "Cut":
        """Return the cut that gives each rank these samples of a full step, one at least."""
        beyond = np.asarray(sizes, np.int64) - 1
        return cls(tuple(beyond.tolist()), step) if beyond.any() else cls.even(beyond.size, step)

    @property
    def is_even(self) -> bool:
        """Return whether all ranks get the same."""
        return len(set(self.weights)) == 1

    def edges(self, samples: int) -> Numbers:
        """Return where in a step of so many samples the part of each rank begins, and the end."""
        world = len(self.weights)
        # A rank without a sample would need torch's Join, so each has one before any has two.
        least = np.arange(world + 1) * int(samples >= world)
        shares = np.cumsum([0, *self.weights])
        edges: Numbers = least + (samples - least[-1]) * shares // shares[-1]
        return edges

    def sizes(self, samples: int) -> Numbers:
        """Return the samples of each rank in a step of so many."""
        return np.diff(self.edges(samples))


class Steps:
    """The steps of a run, the same for all ranks, and how each is cut among them.

    `step // per_epoch` is the epoch. Within it each step takes the next `batch` samples, the last
    one the rest.
    """

    def __init__(self, samples: int, batch: int, world: int, lead: int = 0) -> None:
        """Divide epochs of so many samples into steps of `batch`, over all ranks.

        Of `lead` steps after the current one something may be read: they stay cut as they were.
        """
        self.batch, self.world, self.lead = batch, world, lead
        self.per_epoch = -(-samples // batch)
        self._samples = samples
        self._cuts = [Cut.even(world)]  # the newest one last

    def samples_in(self, step: int) -> int:
        """Return the samples of a step over all ranks: the last of an epoch has the rest."""
        return min(self.batch, self._samples - step % self.per_epoch * self.batch)

    def cut(self, step: int) -> Cut:
        """Return how this step is cut among the ranks."""
        return next(cut for cut in reversed(self._cuts) if cut.step <= step)

    def parts(self, step: int, most: int) -> tuple[tuple[int, ...], int]:
        """Return in how many parts each rank computes its samples, and the fewest of any part.

        A part has at most `most` samples.
        """
        return _parts_and_fewest(self.cut(step), self.samples_in(step), most)

    @property
    def newest_cut(self) -> Cut:
        """The cut of all steps from some later one on."""
        return self._cuts[-1]

    def recut(self, cut: Cut) -> None:
        """Cut the steps from one on otherwise, which no loader worker has begun (see `lead`)."""
        self._cuts.append(cut)


@lru_cache(8)  # all steps but an epoch's last have the same answer
def _parts_and_fewest(cut: Cut, samples: int, most: int) -> tuple[tuple[int, ...], int]:
    # Under an even cut equally many parts on all ranks, as SyncBatchNorm exchanges in each.
    sizes = cut.sizes(samples)
    largest = np.maximum(sizes, sizes.max()) if cut.is_even else sizes
    parts = np.maximum(1, -(-largest // most))
    return tuple(parts.tolist()), int((sizes // parts).min())


class Part(NamedTuple):
    """The samples of one batch."""

    number: int
    """The number of the batch, in the order in which the rank takes them."""
    epoch: int
    first: int
    """The position in the epoch of the first of them."""
    rows: Rows
    """The rows of the index, a sample each."""


def parts_of_rank(order: EpochOrder, steps: Steps, rank: int, start: int) -> Iterator[Part]:
    """Yield the part of one rank of each step from one on, without end."""
    begun = start // steps.per_epoch
    with ThreadPoolExecutor(1) as planner:  # plans an epoch while the one before it trains
        planned = planner.submit(order.rows, begun)
        for epoch in count(begun):
            rows, planned = planned.result(), planner.submit(order.rows, epoch + 1)
            first = epoch * steps.per_epoch
            for step in range(max(start, first), first + steps.per_epoch):
                samples = steps.samples_in(step)
                edges = (step - first) * steps.batch + steps.cut(step).edges(samples)
                begin, end = int(edges[rank]), int(edges[rank + 1])
                yield Part(step - start, epoch, begin, rows[begin:end])
