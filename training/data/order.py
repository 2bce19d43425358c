"""Assign samples to every global step: a pure function of index, seed and epoch.

    rows ──blocks──▶ runs of neighbours in a shard ──permute──▶ one sequence ──cut──▶ lanes
    lanes ──interleave──▶ Order: row by position ──steps──▶ ranks ──lanes──▶ loader workers

A lane reads one block at a time and uses it up in random order, and position p takes the next
sample of lane p mod L. So a batch mixes samples of many blocks, though every block is read once.
There are as many lanes as a step has samples, if there are samples enough: more lanes have smaller
blocks, so that the memory for open blocks grows with the square root of the batch only.
A step is the next B positions: the order knows neither ranks nor workers. A rank owns the lanes
that leave its number when divided by the world size, so it reads blocks of its own; where the
world size does not divide L, a few samples of a step change hands to keep the parts even.

Random numbers are raw output of PCG64, sorted: numpy promises that these never change.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]

BLOCK_BYTES = 2 * 1024 * 1024
LANES = (960, 480, 240, 120, 60, 12)  # divided by all that world sizes are likely to be; or k * 960
SAMPLES_PER_LANE = 16  # fewer, and a smaller number of lanes is better
BLOCKS_PER_LANE = 8  # fewer, and smaller blocks are better
BALANCED_AT_ONCE = 1_000_000  # steps times ranks whose parts are evened out at a time

READ = np.dtype([("row", np.int32), ("samples", np.int32)])  # neighbours, read at once


@dataclass(frozen=True)
class Order:
    """One epoch: `rows[p]` is the index row at position p, `pieces[p]` the read it comes with."""

    rows: Positions
    pieces: Positions
    lanes: int


@dataclass(frozen=True)
class Part:
    """The share of one reader in an epoch, from some position on.

    Four parallel arrays by sample, in the order of use: its row, its position in the epoch, its
    place in the rank's batch, and the number of the read that brings it. `reads` lists these in
    the order of first use, `ends` how many samples the reader has after each step.
    """

    rows: Positions
    positions: Positions
    places: Positions
    brought_by: Positions
    reads: npt.NDArray[np.void]
    ends: Numbers


def shuffled(
    index: npt.NDArray[np.void], rows: Positions, seed: int, epoch: int, batch: int
) -> Order:
    """Return the order of a training epoch over these rows of the index, in steps of `batch`.

    Rows may come more than once, as ascending runs (see `training.data.mixture`): copies of a
    sample then stand in blocks of their own.
    """
    lanes = lane_count(rows.size, batch)
    starts = block_starts(index, rows, lanes, phase=float(_fractions(seed, epoch, 0, 1)[0]))
    blocks = _permutation(seed, epoch, 1, starts.size - 1)
    slots = _permutation(seed, epoch, 2, lanes)
    words = _words(seed, epoch, 3, rows.size)
    return _interleave(rows, starts[blocks], np.diff(starts)[blocks], slots, words)


def resampled(
    index: npt.NDArray[np.void], rows: Positions, seed: int, epoch: int, batch: int, steps: int
) -> Order:
    """Return the order of `steps` steps of these rows, in blocks drawn with replacement."""
    samples = steps * batch
    lanes = lane_count(samples, batch)
    starts = block_starts(index, rows, lanes, phase=float(_fractions(seed, epoch, 0, 1)[0]))
    drawn = (_words(seed, epoch, 1, samples) % np.uint64(starts.size - 1)).astype(np.int64)
    ends = np.cumsum(np.diff(starts)[drawn])
    drawn = drawn[: int(np.searchsorted(ends, samples)) + 1]
    sizes = np.diff(starts)[drawn]
    sizes[-1] -= sizes.sum() - samples
    slots = _permutation(seed, epoch, 2, lanes)
    return _interleave(rows, starts[drawn], sizes, slots, _words(seed, epoch, 3, samples))


def part(
    order: Order,
    index: npt.NDArray[np.void],
    start: int,
    batch: int,
    rank: int = 0,
    world_size: int = 1,
    worker: int = 0,
    workers: int = 1,
) -> Part:
    """Return the part that this worker of this rank reads from position `start` on."""
    samples = order.rows.size
    owner = owners(start, samples, batch, order.lanes, world_size)
    mine = np.flatnonzero(owner == rank).astype(np.int32) + np.int32(start)
    edges = np.append(np.arange(start, samples, batch), samples)
    firsts = np.searchsorted(mine, edges[:-1])
    places = np.arange(mine.size) - np.repeat(firsts, np.diff(np.append(firsts, mine.size)))
    here = mine % order.lanes // world_size % workers == worker
    used = mine[here]
    brought_by, reads = _reads(index, order.rows[used], order.pieces[used])
    return Part(
        rows=order.rows[used],
        positions=used,
        places=places[here].astype(np.int32),
        brought_by=brought_by,
        reads=reads,
        ends=np.searchsorted(used, edges[1:]),
    )


def owners(start: int, stop: int, batch: int, lanes: int, world_size: int) -> Positions:
    """Return the rank of each position; parts of a step (from `start`) differ by at most one."""
    position = np.arange(start, stop, dtype=np.int32)
    owner = position % lanes % world_size
    if lanes % world_size:
        for first, last in _chunks(position.size, batch, world_size):
            moved, receivers = _evened(position[first:last], batch, lanes, world_size)
            owner[first:last][moved] = receivers
    return owner


def lane_count(samples: int, batch: int) -> int:
    """Return a lane for each sample of a step, as long as each has samples enough to shuffle."""
    wanted = -(-batch // LANES[0])
    multiple = min(wanted, samples // (LANES[0] * SAMPLES_PER_LANE))
    if multiple:
        return multiple * LANES[0]
    return next((lanes for lanes in LANES if samples >= lanes * SAMPLES_PER_LANE), LANES[-1])


def block_starts(index: npt.NDArray[np.void], rows: Positions, lanes: int, phase: float) -> Numbers:
    """Return the position in `rows` where each block begins, and the end of the last.

    A block is a run of neighbours in one shard, its edges moved by a fraction of its size from
    epoch to epoch, so that neighbours do not stay together for the whole training.
    """
    ends = np.cumsum(index["length"][rows], dtype=np.int64)
    largest = math.isqrt(BLOCK_BYTES**2 * LANES[0] // max(lanes, LANES[0]))
    size = min(largest, int(ends[-1]) // (lanes * BLOCKS_PER_LANE) + 1)
    number = (ends - ends[0] + int(phase * size)) // size
    shard = index["shard"][rows]
    begins = (np.diff(number) != 0) | (np.diff(shard) != 0) | (np.diff(rows) <= 0)
    return np.concatenate(([0], np.flatnonzero(begins) + 1, [rows.size]))


def _interleave(
    rows: Positions, starts: Numbers, sizes: Numbers, slots: Numbers, words: npt.NDArray[np.uint64]
) -> Order:
    """Cut these blocks of rows into lanes that go to these slots, each piece mixed by `words`."""
    samples, lanes = words.size, slots.size
    sequence = _ranges(starts, sizes)
    lengths = samples // lanes + (slots < samples % lanes)  # by lane; slot 0 is the longest
    firsts = np.cumsum(lengths) - lengths
    begins = np.zeros(samples, bool)
    begins[np.cumsum(sizes)[:-1]] = True
    begins[firsts[lengths > 0]] = True
    piece = np.cumsum(begins, dtype=np.int32)
    sequence = sequence[_mixed(piece, words)]
    position = np.arange(samples, dtype=np.int32) - np.repeat(firsts.astype(np.int32), lengths)
    position *= lanes
    position += np.repeat(slots.astype(np.int32), lengths)
    order, pieces = np.empty(samples, np.int32), np.empty(samples, np.int32)
    order[position] = rows[sequence]
    pieces[position] = piece
    return Order(order, pieces, lanes)


def _mixed(piece: Positions, words: npt.NDArray[np.uint64]) -> Numbers:
    """Return the places of the samples once each piece is shuffled within itself."""
    words >>= np.uint64(32)
    words |= piece.astype(np.uint64) << np.uint64(32)
    return np.argsort(words, kind="stable")


def _evened(
    position: Positions, batch: int, lanes: int, world_size: int
) -> tuple[Numbers, Numbers]:
    """Return the positions that leave their lane's rank, and the ranks that get them."""
    owner = position % lanes % world_size
    step = (position - position[0]) // batch
    edges = np.append(position[::batch], position[-1] + 1)
    before = _owned_before(edges, lanes, world_size)  # (steps + 1, ranks)
    counts = np.diff(before, axis=0)
    largest_first = np.argsort(np.argsort(-counts, axis=1, kind="stable"), axis=1)
    totals = np.diff(edges)[:, None]
    fair = totals // world_size + (largest_first < totals % world_size)
    turn = (position // lanes) * ((lanes + world_size - 1 - owner) // world_size)
    turn += position % lanes // world_size - before[step, owner]
    missing = fair - np.minimum(counts, fair)
    receivers = np.repeat(np.tile(np.arange(world_size), missing.shape[0]), missing.ravel())
    return np.flatnonzero(turn >= fair[step, owner]), receivers


def _owned_before(position: Numbers, lanes: int, world_size: int) -> Numbers:
    """Count the positions before each of these in lanes of each rank: (positions, ranks)."""
    spare = world_size - 1 - np.arange(world_size)
    rounds, slot = np.divmod(position[:, None], lanes)
    return rounds * ((lanes + spare) // world_size) + (slot + spare) // world_size


def _chunks(samples: int, batch: int, world_size: int) -> Iterator[tuple[int, int]]:
    size = max(1, BALANCED_AT_ONCE // world_size) * batch
    return ((first, min(first + size, samples)) for first in range(0, samples, size))


def _reads(
    index: npt.NDArray[np.void], rows: Positions, pieces: Positions
) -> tuple[Positions, npt.NDArray[np.void]]:
    """Join neighbours of a piece in one read; return each sample's read, and the reads."""
    if not rows.size:
        return np.empty(0, np.int32), np.empty(0, READ)
    by_place = np.lexsort((rows, pieces)).astype(np.int32)
    row = rows[by_place]
    offset, length = index["offset"][row], index["length"][row]
    begins = np.ones(row.size, bool)
    begins[1:] = offset[:-1] + length[:-1] != offset[1:]
    begins[1:] |= np.diff(pieces[by_place]) != 0
    first = np.flatnonzero(begins)
    number = np.cumsum(begins, dtype=np.int32) - np.int32(1)
    earliest = np.argsort(np.minimum.reduceat(by_place, first))
    turn = np.empty(first.size, np.int32)
    turn[earliest] = np.arange(first.size, dtype=np.int32)
    brought_by = np.empty(row.size, np.int32)
    brought_by[by_place] = turn[number]
    reads = np.empty(first.size, READ)
    reads["row"] = row[first[earliest]]
    reads["samples"] = np.diff(np.append(first, row.size))[earliest]
    return brought_by, reads


def _ranges(starts: Numbers, counts: Numbers) -> Positions:
    """Return the numbers start, start + 1, … of each range, one after the other."""
    before = np.cumsum(counts) - counts
    numbers = np.arange(int(counts.sum()), dtype=np.int32)
    numbers += np.repeat((starts - before).astype(np.int32), counts)
    return numbers


def _permutation(seed: int, epoch: int, purpose: int, size: int) -> Numbers:
    return np.argsort(_words(seed, epoch, purpose, size), kind="stable")


def _fractions(seed: int, epoch: int, purpose: int, size: int) -> npt.NDArray[np.float64]:
    return _words(seed, epoch, purpose, size) / 2.0**64


def _words(seed: int, epoch: int, purpose: int, size: int) -> npt.NDArray[np.uint64]:
    """Return random 64-bit words, always the same for the same numbers."""
    return np.random.PCG64(np.random.SeedSequence((seed, epoch, purpose))).random_raw(size)
