"""Even out the parts of the ranks in every step, where their lanes do not give them what is cut.

The samples that leave a rank are its last ones in the step, and their positions follow from counts
alone. So this costs a few operations per rank and step, and none per sample.
"""

from collections.abc import Iterator

import numpy as np

from training.data.order.cut import Cut, Lanes
from training.data.order.epoch import Numbers, ranges

AT_ONCE = 100_000  # steps times ranks
NEVER = np.iinfo(np.int64).min // 2

Moves = tuple[Numbers, Numbers, Numbers]  # positions in ascending order, givers, receivers


def moves(start: int, stop: int, batch: int, lanes: Lanes, cut: Cut) -> Iterator[Moves]:
    """Yield the samples that go to another rank than that of their lane, in steps from `start`.

    Each rank then has what the cut gives it, or one sample more.
    """
    if cut.is_even and lanes.lanes % cut.world == 0:
        return
    portion = max(1, AT_ONCE // cut.world) * batch
    for first in range(start, stop, portion):
        last = min(first + portion, stop)
        yield _moves(np.append(np.arange(first, last, batch), last), lanes, cut)


def _moves(edges: Numbers, lanes: Lanes, cut: Cut) -> Moves:
    ranks = range(cut.world)
    before = np.stack([lanes.before(edges, rank) for rank in ranks], axis=1)  # (steps + 1, ranks)
    counts, totals = np.diff(before, axis=0), np.diff(edges)
    fair = cut.fewest(totals)
    # One more for those whose lanes have the most beyond it: so the fewest samples change ranks.
    beyond = np.where(cut.most(totals) > fair, counts - fair, NEVER)
    most_first = np.argsort(np.argsort(-beyond, axis=1, kind="stable"), axis=1)
    fair += most_first < (totals - fair.sum(axis=1))[:, None]
    spare = np.maximum(counts - fair, 0)
    missing = np.maximum(fair - counts, 0)
    steps, givers = np.nonzero(spare)
    leaving = spare[steps, givers]
    turns = ranges((before[:-1] + fair)[steps, givers], leaving)
    givers = np.repeat(givers, leaving)
    rounds, ordinals = np.divmod(turns, lanes.counts[givers])
    positions = rounds * lanes.lanes + lanes.place(givers, ordinals)
    receivers: Numbers = np.repeat(np.tile(ranks, len(totals)), missing.ravel())
    by_position = np.argsort(positions)
    return positions[by_position], givers[by_position], receivers
