"""Cut the rows of the index into blocks, and put these in the order of an epoch.

There are as many lanes as a step has samples, if there are samples enough: more lanes have smaller
blocks, so that the memory for open blocks grows with the square root of the batch only.

The index is read in portions, and what is kept of it are eight bytes a block.
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from training.data.order.epoch import EpochOrder, Numbers, Positions, Rows
from training.data.order.random_words import BLOCKS, PHASE, Stream, fraction, permutation

BLOCK_BYTES = 2 * 1024 * 1024
LANES = (960, 480, 240, 120, 60, 12)  # divided by all that world sizes are likely to be; or k * 960
SAMPLES_PER_LANE = 16  # fewer, and a smaller number of lanes is better
BLOCKS_PER_LANE = 8  # fewer, and smaller blocks are better
ROWS_AT_ONCE = 1 << 16  # of the index: 3 MB, which stay in a core's cache


def shuffled(
    index: npt.NDArray[np.void], rows: Rows, seed: int, epoch: int, batch: int
) -> EpochOrder:
    """Return the order of a training epoch over these rows of the index, in steps of `batch`.

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
    """Return the order of `steps` steps of these rows, in blocks drawn with replacement."""
    samples = steps * batch
    lanes = lane_count(samples, batch)
    starts = block_starts(index, rows, lanes, fraction(seed, epoch, PHASE))
    sizes, draws = np.diff(starts), 64
    while True:
        random_raw = Stream(seed, epoch, BLOCKS).random_raw(0, draws)
        drawn = (random_raw % np.uint64(sizes.size)).astype(np.int32)
        ends = np.cumsum(sizes[drawn], dtype=np.int64)
        if ends[-1] >= samples:
            break
        draws *= 2
    used = int(np.searchsorted(ends, samples)) + 1
    cut = np.minimum(ends[:used], samples).astype(np.int32)
    return EpochOrder(rows, starts[drawn[:used]], cut, lanes, seed, epoch)


def lane_count(samples: int, batch: int) -> int:
    """Return a lane for each sample of a step, as long as each has samples enough to shuffle."""
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
            begins |= np.diff(rows_here, prepend=last[2]) <= 0
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
    """Return the bytes of a block: BLOCK_BYTES, less for small data sets and for large batches."""
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
