"""The order of exact epochs: which row of the index each step trains on.

It is a function of seed, epoch and batch alone. It knows neither ranks nor loader workers, so that
all of them agree without an exchange, and a run resumes by the number of its step.

Rows lie in blocks of neighbours in a shard. An epoch puts the blocks in random order on a circle,
and spreads the samples of each over the OPEN blocks from there on. So every batch mixes samples of
that many blocks, while what is read in some minutes lies close together: on a disk, in a cache.

A step is the next `batch` rows of the order, and each rank has a part of them (`Cut`).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 2 << 20
OPEN = 1024
"""Blocks that samples are mixed across at least: 2 GiB, over all ranks, for the page cache."""
MOST_SHARE = 3
"""Times of its even part that a rank gets at most, and that loader workers have memory for."""

Numbers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]


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
    # At even distances, not anywhere: two neighbours then seldom meet in a batch.
    turn *= (min(max(OPEN, batch), sizes.size) / sizes)[block]
    return rows[np.argsort((places[block] + turn) % sizes.size, kind="stable")]


def _block_starts(index: npt.NDArray[np.void], rows: Rows, shift: int) -> Numbers:
    # The edges move from epoch to epoch, so that neighbours do not stay together for all training.
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
