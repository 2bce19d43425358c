"""Assign samples to every global step: a pure function of index, seed and epoch.

    rows ──blocks──▶ runs of neighbours in a shard ──permute──▶ one sequence ──cut──▶ lanes
    lanes ──interleave──▶ row by position ──steps──▶ ranks ──lanes──▶ loader workers

A lane reads one block at a time and uses it up in random order, and position p takes the next
sample of lane p mod L. So a batch mixes samples of many blocks, though every block is read once.
A step is the next B positions: the order knows neither ranks nor workers.

An order is kept as its blocks, eight bytes for up to 2 MiB of the data set. Which samples a block
has, and in which order, is computed for some of its pieces at a time (`mixed`), so that a reader
computes no more than it reads.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from training.data.order.random_words import MIXING, SLOTS, Stream, permutation

Numbers = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]
Rows = Positions | range  # of the index; the first ones of it need no memory
Pieces = npt.NDArray[np.void]

LANES_AT_ONCE = 64

PIECE = np.dtype([
    ("sequence_index", np.int32),  # of its first sample in the sequence of all lanes
    ("samples", np.int32),
    ("start", np.int32),  # of its first sample among the rows that the order is drawn from
    ("position", np.int32),  # in the epoch, of the sample that is used first
])  # fmt: skip
"""A block, or what a lane has of it: the next sample of a lane comes `lanes` positions later."""


@dataclass(frozen=True)
class EpochOrder:
    """One epoch: blocks of rows, one after the other through all lanes."""

    drawn: Rows
    starts: Positions
    """By block: its first place in `drawn`."""
    ends: Positions
    """By block: the place in the sequence that follows it."""
    lanes: int
    seed: int
    epoch: int

    @property
    def samples(self) -> int:
        """Samples of the epoch."""
        return int(self.ends[-1])

    @property
    def rows(self) -> Positions:
        """The index row at every position of the epoch."""
        rows = np.empty(self.samples, np.int32)
        for first in range(0, self.lanes, LANES_AT_ONCE):
            pieces = self.pieces_of(np.arange(first, min(first + LANES_AT_ONCE, self.lanes)))
            _, piece_rows, positions = mixed(pieces, self.drawn, self.lanes, self.stream())
            rows[positions] = piece_rows
        return rows

    def stream(self) -> Stream:
        """Return the random words that mix the samples of pieces."""
        return Stream(self.seed, self.epoch, MIXING)

    def pieces_of(self, lanes: Numbers) -> Pieces:
        """Return the pieces of these lanes, lane by lane in the order of their use."""
        lanes = lanes[self.lengths[lanes] > 0]
        first = self._block_at(self.firsts[lanes])
        last = self._block_at(self.firsts[lanes] + self.lengths[lanes] - 1)
        return self._pieces(np.repeat(lanes, last - first + 1), ranges(first, last - first + 1))

    def pieces_at(self, positions: Numbers) -> Pieces:
        """Return the pieces that the samples at these positions belong to, each of them once."""
        lanes = np.argsort(self.slots)[positions % self.lanes]
        blocks = self._block_at(self.firsts[lanes] + positions // self.lanes)
        piece_ids = np.unique(lanes * self.ends.size + blocks)
        return self._pieces(*np.divmod(piece_ids, self.ends.size))

    def _block_at(self, sequence_indices: Numbers) -> Numbers:
        return np.searchsorted(self.ends, sequence_indices.astype(np.int32), side="right")

    def _pieces(self, lanes: Numbers, blocks: npt.NDArray[np.integer]) -> Pieces:
        """Return what each of these lanes has of the block beside it."""
        begins = np.where(blocks, self.ends[blocks - 1], 0)
        first = np.maximum(begins, self.firsts[lanes])
        pieces = np.empty(blocks.size, PIECE)
        pieces["sequence_index"] = first
        pieces["samples"] = (
            np.minimum(self.ends[blocks], self.firsts[lanes] + self.lengths[lanes]) - first
        )
        pieces["start"] = self.starts[blocks] + first - begins
        pieces["position"] = (first - self.firsts[lanes]) * self.lanes + self.slots[lanes]
        return pieces

    @cached_property
    def slots(self) -> Numbers:
        """By lane: its place in every round of the lanes."""
        return permutation(self.seed, self.epoch, SLOTS, self.lanes).astype(np.int64)

    @cached_property
    def lengths(self) -> Numbers:
        """By lane: its samples; those in the first slots may have one more."""
        return self.samples // self.lanes + (self.slots < self.samples % self.lanes)

    @cached_property
    def firsts(self) -> Numbers:
        """By lane: its first place in the sequence."""
        return np.cumsum(self.lengths) - self.lengths


def mixed(
    pieces: Pieces, drawn: Rows, lanes: int, stream: Stream
) -> tuple[Positions, Positions, Positions]:
    """Return all samples of these pieces: number of the piece, row, and position in the epoch.

    Within a piece rows ascend, and positions are a random permutation: the first 32 bits of each
    sample's word, sorted.
    """
    samples = pieces["samples"]
    number = np.repeat(np.arange(pieces.size, dtype=np.int32), samples)
    within = ranges(np.zeros(pieces.size, np.int32), samples)
    keys = _random_keys(pieces, stream)
    keys >>= np.uint64(32)
    keys |= number.astype(np.uint64) << np.uint64(32)
    turns = np.empty(number.size, np.int32)
    turns[np.argsort(keys, kind="stable")] = within
    rows = pieces["start"][number] + within
    if not isinstance(drawn, range):
        rows = drawn[rows]
    return number, rows, pieces["position"][number] + turns * np.int32(lanes)


def _random_keys(pieces: Pieces, stream: Stream) -> npt.NDArray[np.uint64]:
    """Return a word for each sample of these pieces; neighbours in the sequence at once."""
    if not pieces.size:
        return np.empty(0, np.uint64)
    follows = pieces["sequence_index"][1:] == pieces["sequence_index"][:-1] + pieces["samples"][:-1]
    first = np.flatnonzero(np.append(True, ~follows))
    counts = np.add.reduceat(pieces["samples"], first)
    runs = zip(pieces["sequence_index"][first].tolist(), counts.tolist(), strict=True)
    return np.concatenate([stream.random_raw(*run) for run in runs])


def ranges(starts: npt.NDArray[np.integer], counts: npt.NDArray[np.integer]) -> Positions:
    """Return the numbers start, start + 1, … of each range, one after the other."""
    before = np.cumsum(counts) - counts
    numbers = np.arange(int(counts.sum()), dtype=np.int32)
    numbers += np.repeat((starts - before).astype(np.int32), counts)
    return numbers
