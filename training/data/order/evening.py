"""Even out the parts of the ranks in every step, where the world size does not divide the lanes.

The samples that leave a rank are its last ones in the step, and their positions follow from counts
alone. So this costs a few operations per rank and step, and none per sample.
"""

from collections.abc import Iterator

import numpy as np

from training.data.order.epoch import Numbers, ranges

AT_ONCE = 100_000  # steps times ranks

Moves = tuple[Numbers, Numbers, Numbers]  # positions in ascending order, givers, receivers


def moves(start: int, stop: int, batch: int, lanes: int, world_size: int) -> Iterator[Moves]:
    """Yield the samples that go to another rank than that of their lane, in steps from `start`.

    Parts of a step then differ by one sample at most.
    """
    if lanes % world_size == 0:
        return
    portion = max(1, AT_ONCE // world_size) * batch
    for first in range(start, stop, portion):
        last = min(first + portion, stop)
        yield _moves(np.append(np.arange(first, last, batch), last), lanes, world_size)


def owned_before(positions: Numbers, lanes: int, world_size: int, rank: int | Numbers) -> Numbers:
    """Count the positions before each of these in lanes of this rank, or of these ranks."""
    spare = world_size - 1 - rank
    whole_rounds: Numbers = positions // lanes * ((lanes + spare) // world_size)
    return whole_rounds + (positions % lanes + spare) // world_size


def _moves(edges: Numbers, lanes: int, world_size: int) -> Moves:
    ranks = np.arange(world_size)
    before = owned_before(edges[:, None], lanes, world_size, ranks)  # (steps + 1, ranks)
    counts, totals = np.diff(before, axis=0), np.diff(edges)[:, None]
    largest_first = np.argsort(np.argsort(-counts, axis=1, kind="stable"), axis=1)
    fair = totals // world_size + (largest_first < totals % world_size)
    spare = np.maximum(counts - fair, 0)
    missing = np.maximum(fair - counts, 0)
    steps, givers = np.nonzero(spare)
    leaving = spare[steps, givers]
    turns = ranges((before[:-1] + fair)[steps, givers], leaving)
    givers = np.repeat(givers, leaving)
    rounds, slots = np.divmod(turns, (lanes + world_size - 1 - givers) // world_size)
    positions = rounds * lanes + slots * world_size + givers
    receivers: Numbers = np.repeat(np.tile(ranks, len(totals)), missing.ravel())
    by_position = np.argsort(positions)
    return positions[by_position], givers[by_position], receivers
