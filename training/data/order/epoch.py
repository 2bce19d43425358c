"""The order of an epoch: a sample for every place in every global step.

    rows ──blocks──▶ runs of neighbours in a shard ──permute──▶ one sequence ──cut──▶ lanes
    lanes ──interleave──▶ row by position ──steps──▶ ranks ──lanes──▶ loader workers

It is a pure function of index, seed and epoch. A lane reads one block at a time and uses it up in
random order, and position p takes the next sample of lane p mod L. So a batch mixes samples of many
blocks, though every block is read once. A step is the next B positions: the order knows neither
ranks nor workers.

An order is kept as its blocks, eight bytes for up to 2 MiB of the data set. Which samples a block
has, and in which order, is computed for some of its pieces at a time (`mixed`), so that a reader
computes no more than it reads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rackrun.training.data.order.random_words import (
    BLOCKS,
    MIXING,
    PHASE,
    SLOTS,
    Stream,
    fraction,
    permutation,
)

Numbers = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]
Rows = Positions | range  # of the index; the first ones of it need no memory
Pieces = npt.NDArray[np.void]

BLOCK_BYTES = 2 * 1024 * 1024
LANES = (960, 480, 240, 120, 60, 12)  # divided by all that world sizes are likely to be; or k * 960
SAMPLES_PER_LANE = 16  # fewer, and a smaller number of lanes is better
BLOCKS_PER_LANE = 8  # fewer, and smaller blocks are better
ROWS_AT_ONCE = 1 << 16  # of the index: 3 MB, which stay in a core's cache
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
        """The index row at every position of the epoch, which readers never compute as a whole."""
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
        # lanes[i] and blocks[i] make a piece: the lane may have a part of the block only.
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


def shuffled(
    index: npt.NDArray[np.void], rows: Rows, seed: int, epoch: int, batch: int
) -> EpochOrder:
    """Return the order of an epoch that has each of these rows of the index, in steps of `batch`.

    Rows may come more than once, as ascending runs (see `training.data.mixture`): copies of a
    sample are then in blocks of their own.
    """
    lanes = lane_count(len(rows), batch)
    starts = block_starts(index, rows, lanes, fraction(seed, epoch, PHASE))
    blocks = permutation(seed, epoch, BLOCKS, starts.size - 1)
    ends = np.cumsum(np.diff(starts)[blocks]).astype(np.int32)
    return EpochOrder(rows, starts[blocks], ends, lanes, seed, epoch)


def resampled(
    index: npt.NDArray[np.void], rows: Rows, seed: int, epoch: int, batch: int, steps: int
) -> EpochOrder:
    """Return the order of that many steps, in blocks of these rows drawn with replacement."""
    samples = steps * batch
    lanes = lane_count(samples, batch)
    starts = block_starts(index, rows, lanes, fraction(seed, epoch, PHASE))
    sizes, draws = np.diff(starts), 64
    while True:  # twice as many blocks each time, until they have enough samples
        random_raw = Stream(seed, epoch, BLOCKS).random_raw(0, draws)
        # The remainder of a 64-bit word is uniform to within one part in billions.
        drawn = (random_raw % np.uint64(sizes.size)).astype(np.int32)
        ends = np.cumsum(sizes[drawn], dtype=np.int64)
        if ends[-1] >= samples:
            break
        draws *= 2
    used = int(np.searchsorted(ends, samples)) + 1
    cut = np.minimum(ends[:used], samples).astype(np.int32)
    return EpochOrder(rows, starts[drawn[:used]], cut, lanes, seed, epoch)


def lane_count(samples: int, batch: int) -> int:
    """Return a lane for each sample of a step, as long as each has samples enough to shuffle.

    More lanes have smaller blocks (`_block_size`), so that the memory for open blocks grows with
    the square root of the batch only.
    """
    rounded_up = -(-batch // LANES[0])
    multiple = min(rounded_up, samples // (LANES[0] * SAMPLES_PER_LANE))
    if multiple:
        return multiple * LANES[0]
    return next((lanes for lanes in LANES if samples >= lanes * SAMPLES_PER_LANE), LANES[-1])


def block_starts(index: npt.NDArray[np.void], rows: Rows, lanes: int, phase: float) -> Positions:
    """Return the place in `rows` where each block begins, and the end of the last.

    A block is a run of neighbours in one shard, its edges moved by a fraction of its size from
    epoch to epoch, so that neighbours do not stay together for the whole training.
    """
    size = _block_size(index, rows, lanes)
    starts, bytes_before, last = [], 0, np.zeros(3, np.int64)  # of the sample before: see `facts`
    for first, rows_here, portion in portions(index, rows):
        ends = np.cumsum(portion["length"], dtype=np.int64)
        if not first:
            shift = int(phase * size) - int(ends[0])
        ends += bytes_before
        bytes_before = int(ends[-1])
        facts = ((ends + shift) // size, portion["shard"], rows_here)
        begins = _changes(facts[0], last[0]) | _changes(facts[1], last[1])
        if not isinstance(rows_here, range):
            begins |= np.diff(rows_here, prepend=last[2]) <= 0  # a row's next copy
        begins[0] |= not first
        starts.append((first + np.flatnonzero(begins)).astype(np.int32))
        last = np.array([fact[-1] for fact in facts], np.int64)
    return np.concatenate([*starts, np.array([len(rows)], np.int32)])


def _changes(numbers: npt.NDArray[np.integer], before: int) -> npt.NDArray[np.bool_]:
    """Return where the numbers differ from the one before; `before` is that of the first."""
    changes = np.empty(numbers.size, bool)
    changes[0] = numbers[0] != before
    np.not_equal(numbers[1:], numbers[:-1], out=changes[1:])
    return changes


def _block_size(index: npt.NDArray[np.void], rows: Rows, lanes: int) -> int:
    """Return bytes: BLOCK_BYTES, less for small data sets and for large batches."""
    largest = math.isqrt(BLOCK_BYTES**2 * LANES[0] // max(lanes, LANES[0]))
    total = 0
    for _, _, portion in portions(index, rows):
        total += int(portion["length"].sum(dtype=np.int64))
        if total // (lanes * BLOCKS_PER_LANE) >= largest:
            return largest
    return min(largest, total // (lanes * BLOCKS_PER_LANE) + 1)


def portions(
    index: npt.NDArray[np.void], rows: Rows
) -> Iterator[tuple[int, Rows, npt.NDArray[np.void]]]:
    """Yield portions of these rows: place of the first, the rows, and what the index has there."""
    for first in range(0, len(rows), ROWS_AT_ONCE):
        portion_rows = rows[first : first + ROWS_AT_ONCE]
        portion = (
            index[portion_rows.start : portion_rows.stop]
            if isinstance(portion_rows, range)
            else index[portion_rows]
        )
        yield first, portion_rows, portion


def rows_by_label(index: npt.NDArray[np.void], rows: Rows, labels: int) -> Numbers:
    """Count the rows of each label."""
    counts = np.zeros(labels, np.int64)
    for _, _, portion in portions(index, rows):
        counts += np.bincount(portion["label"], minlength=labels)
    return counts


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
    # One sort for all pieces: the piece is in the upper half of the key, a random word below it.
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
    if not pieces.size:
        return np.empty(0, np.uint64)
    # One call for neighbours in the sequence: a call and a skip cost more than many words.
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
