"""Pairs of images that are nearly the same: scaled, cropped, encoded anew, mirrored, tinted.

    hashes -> pairs that differ in few bits -> nearer than neighbours are -> aligned -> NearPair

Every image is compared with all others by 256 bits, which takes some nanoseconds. A hash alone
either misses crops or takes textures and handwriting for copies. So a candidate is looked at again,
in 16 x 16 pixels: the correlation of the two is the best over the crops in CROPS, and its distance
from 1 has to be small beside that of the image's fifth-nearest neighbour. Images of one kind
(digits, X-rays) are all near one another, photographs are not; a copy is much nearer than either.
The limits were chosen on real photographs and digits: docs/internals/doctor.md has the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rackrun.convert.doctor.fingerprints import THUMB
from rackrun.convert.packing.workers import ReportProgress, in_parallel
from rackrun.convert.progress import Progress

MOST_BITS = 90  # of 256 in which two hashes may differ; those of unrelated images differ in 128
FARTHEST = 0.2  # distance (1 - correlation) of a copy, whatever its neighbours are
SHARE = 0.2  # of the distance of a neighbour, at most
NEIGHBOUR = 5  # the fifth-nearest: copies of an image may come before it
SAMPLE = 2000  # images among which neighbours are sought
CROPS = (0.03, 0.06, 0.1)  # of width and height, off either end or both
BOUNDS = (0.25, 1.25)  # of the typical distance of a neighbour: what that of an image may be

ROWS, COLUMNS, PAIRS = 16, 1 << 14, 256  # compared at once: what stays in a processor's caches
JOB_ROWS = 512

Floats = NDArray[np.float32]


class NearPair(NamedTuple):
    """Two images, by their numbers, of which one is nearly a copy of the other."""

    first: int
    second: int
    correlation: float
    mirrored: bool


class Prints(NamedTuple):
    """What is compared, a row for each image."""

    hashes: np.ndarray
    """uint64 (images, 4)."""
    mirrored: np.ndarray
    """uint64 (images, 4): those of the mirror images."""
    thumbs: np.ndarray
    """uint8 (images, THUMB, THUMB)."""
    reach: Floats
    """The distance of a neighbour."""

    @classmethod
    def of(cls, fingerprints: np.ndarray) -> Prints:
        """Return the prints of these fingerprints."""
        thumbs = np.ascontiguousarray(fingerprints["thumb"])
        hashes, mirrored = (
            np.ascontiguousarray(fingerprints[name]) for name in ("hash", "mirrored")
        )
        return cls(hashes, mirrored, thumbs, neighbour_distances(thumbs))


def near_pairs(prints: Prints, workers: int) -> list[NearPair]:
    """Return all pairs of near copies, each once, found by as many processes."""
    count = len(prints.thumbs)
    jobs = [range(start, min(start + JOB_ROWS, count)) for start in range(0, count, JOB_ROWS)]
    best: dict[tuple[int, int], NearPair] = {}
    results = in_parallel(jobs, partial(_compare, prints=prints), workers, "compared", count)
    for pair in chain.from_iterable(results):
        # A pair may be near both as it is and as a mirror image.
        before = best.get(pair[:2])
        if before is None or pair.correlation > before.correlation:
            best[pair[:2]] = pair
    return sorted(best.values())


def neighbour_distances(thumbs: np.ndarray) -> Floats:
    """Return the distance of each image's fifth-nearest neighbour in a sample of the images.

    It stays within bounds where many are copies of one image, and where an image stands alone.
    """
    count = len(thumbs)
    if count <= NEIGHBOUR:
        return np.ones(count, np.float32)
    chosen = np.random.default_rng(0).permutation(count)[:SAMPLE]
    sample = _unit(thumbs[chosen])
    distances = np.empty(count, np.float32)
    for start in range(0, count, 1024):
        correlations = _unit(thumbs[start : start + 1024]) @ sample.T
        itself = np.arange(start, start + len(correlations))[:, None] == chosen
        correlations[itself] = -1
        nearest = np.partition(correlations, -NEIGHBOUR, axis=1)[:, -NEIGHBOUR]
        distances[start : start + 1024] = 1 - nearest
    typical = float(np.median(distances))
    return distances.clip(BOUNDS[0] * typical, BOUNDS[1] * typical)


def _compare(rows: range, report: ReportProgress, prints: Prints) -> list[NearPair]:
    """Return the near copies of these images among those after them."""
    pairs = list[NearPair]()
    for start in range(rows.start, rows.stop, ROWS):
        stop = min(start + ROWS, rows.stop)
        for is_mirrored in (False, True):
            for first, second in _candidates(prints, start, stop, is_mirrored):
                pairs += _confirmed(prints, first, second, is_mirrored)
        report(Progress(stop - start))
    return pairs


def _candidates(
    prints: Prints, start: int, stop: int, is_mirrored: bool
) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Yield the numbers of images whose hashes differ in few bits."""
    others = prints.mirrored if is_mirrored else prints.hashes
    for left in range(start, len(others), COLUMNS):
        columns = others[left : left + COLUMNS]
        differing = np.zeros((stop - start, len(columns)), np.uint16)
        for word in range(prints.hashes.shape[1]):
            differing += np.bitwise_count(
                prints.hashes[start:stop, word, None] ^ columns[None, :, word]
            )
        first, second = np.nonzero(differing <= MOST_BITS)
        first, second = first + start, second + left
        # Each pair once, and no image with itself: many are their own mirror image.
        yield first[first < second], second[first < second]


def _confirmed(
    prints: Prints, first: NDArray[np.intp], second: NDArray[np.intp], is_mirrored: bool
) -> Iterator[NearPair]:
    """Yield those pairs that are nearly the same in pixels, too."""
    for start in range(0, len(first), PAIRS):
        chosen, others = first[start : start + PAIRS], second[start : start + PAIRS]
        reach = np.minimum(prints.reach[chosen], prints.reach[others])
        left, right = prints.thumbs[chosen], prints.thumbs[others]
        right = right[:, :, ::-1] if is_mirrored else right
        near = 1 - (_unit(left) * _unit(right)).sum(1) <= reach
        chosen, others, reach = chosen[near], others[near], reach[near]
        correlations = aligned(left[near], right[near])
        for number in np.flatnonzero(1 - correlations <= np.minimum(FARTHEST, SHARE * reach)):
            pair = int(chosen[number]), int(others[number])
            yield NearPair(*pair, float(correlations[number]), is_mirrored)


def aligned(left: np.ndarray, right: np.ndarray) -> Floats:
    """Return the correlation of each pair, the best over crops of either: float32 (pairs,)."""
    if not len(left):
        return np.empty(0, np.float32)
    across, down = _windows()
    best = np.full(len(left), -1, np.float32)
    for whole, cropped in ((left, right), (right, left)):
        views = down @ whole[:, None].astype(np.float32) @ across.transpose(0, 2, 1)
        correlations = (_unit(views) * _unit(cropped)[:, None]).sum(2)
        best = np.maximum(best, correlations.max(1))
    return best


@cache
def _windows() -> tuple[Floats, Floats]:
    """Return what cuts each of the windows out of a square: float32 (windows, THUMB, THUMB)."""
    windows = [(0.0, 0.0, 0.0)]
    windows += [(crop, x, y) for crop in CROPS for x in (0, 0.5, 1) for y in (0, 0.5, 1)]
    across = [_window(crop, x) for crop, x, _ in windows]
    down = [_window(crop, y) for crop, _, y in windows]
    return np.stack(across), np.stack(down)


def _window(crop: float, at: float) -> Floats:
    """Return the matrix that stretches a part of THUMB pixels to all of them, linearly."""
    positions = ((np.arange(THUMB) + 0.5) / THUMB * (1 - crop) + at * crop) * THUMB - 0.5
    positions = positions.clip(0, THUMB - 1)
    below = positions.astype(int).clip(0, THUMB - 2)
    matrix = np.zeros((THUMB, THUMB), np.float32)
    matrix[np.arange(THUMB), below] = 1 - (positions - below)
    matrix[np.arange(THUMB), below + 1] += positions - below
    return matrix


def _unit(thumbs: np.ndarray) -> Floats:
    """Return thumbs (..., THUMB, THUMB) as vectors (..., THUMB²) of mean 0 and length 1."""
    flat = thumbs.reshape(*thumbs.shape[:-2], -1).astype(np.float32)
    flat -= flat.mean(-1, keepdims=True)
    lengths = np.sqrt((flat * flat).sum(-1, keepdims=True))
    unit: Floats = flat / np.maximum(lengths, 1e-6)
    return unit
