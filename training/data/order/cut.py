"""How steps are cut among ranks: evenly, or with more samples for some of them.

A rank owns lanes in proportion to its samples of a full step, spread evenly over the round of the
lanes. What a step then gives it too many or too few of changes ranks (`moves`), so that counts
follow from the cut alone. Those are a rank's last samples in the step, and their positions follow
from counts, too: this costs a few operations per rank and step, and none per sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rackrun.training.data.order.epoch import Numbers, ranges

MOST_SHARE = 3
"""Times of its even part that a rank gets at most, and that loader workers have memory for."""
MOVES_AT_ONCE = 100_000  # steps times ranks: bounds the memory of a long epoch
NEVER = np.iinfo(np.int64).min // 2  # half, as it is negated: the least number has no opposite

Moves = tuple[Numbers, Numbers, Numbers]  # positions in ascending order, givers, receivers


@dataclass(frozen=True)
class Cut:
    """The cut of the steps from one on."""

    weights: tuple[int, ...]
    """By rank, in which proportion it gets what a step has beyond one sample for each."""
    step: int = 0
    """The first step that is cut so."""

    @classmethod
    def even(cls, world: int, step: int = 0) -> "Cut":
        """Return the cut in which parts of a step differ by one sample at most."""
        return cls((1,) * world, step)

    @classmethod
    def into(cls, samples: npt.ArrayLike, step: int = 0) -> "Cut":
        """Return the cut that gives each rank these samples of a full step, one at least."""
        return cls(tuple((np.asarray(samples, np.int64) - 1).tolist()), step)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.weights)

    @property
    def is_even(self) -> bool:
        """Return whether all ranks get the same."""
        return len(set(self.weights)) == 1

    def fewest(self, totals: npt.ArrayLike) -> Numbers:
        """Return the least samples of each rank in steps of these totals: (…, ranks).

        Where a step has more than that, some ranks get one sample more.
        """
        each = np.asarray(totals, np.int64)[..., None]
        least = (each >= self.world).astype(np.int64)
        fewest: Numbers = least + (each - least * self.world) * self._shares // self._whole
        return fewest

    def most(self, totals: npt.ArrayLike) -> Numbers:
        """Return the most samples of each rank in steps of these totals: (…, ranks)."""
        each = np.asarray(totals, np.int64)[..., None]
        least = (each >= self.world).astype(np.int64)
        beyond = least * self.world - each  # negative, so that the division rounds up
        most: Numbers = least - beyond * self._shares // self._whole
        return most

    @property
    def _shares(self) -> Numbers:
        return np.array(self.weights, np.int64)

    @property
    def _whole(self) -> int:
        return sum(self.weights)


class Lanes:
    """Which lanes belong to which rank; a lane's number is its position in a round of all lanes."""

    def __init__(self, cut: Cut, lanes: int) -> None:
        self.lanes = lanes
        samples = np.array(cut.weights, np.int64) + 1  # of a full step, in proportion
        self.counts, rests = np.divmod(lanes * samples, samples.sum())
        """By rank, its lanes."""
        self.counts[np.flatnonzero(rests)[: lanes - int(self.counts.sum())]] += 1
        ranks = np.arange(cut.world).repeat(self.counts)
        ordinals = np.arange(lanes) - (np.cumsum(self.counts) - self.counts).repeat(self.counts)
        # The nth of k lanes belongs at (n + 1/2) / k of the round; here twice that.
        turns = np.argsort((2 * ordinals + 1) / self.counts.repeat(self.counts), kind="stable")
        self.owners = ranks[turns]
        """By lane, the rank."""
        self.ordinals = ordinals[turns]
        """By lane, which of its rank's lanes it is."""
        self._by_rank = np.argsort(turns)  # the first rank's lanes, then the next one's
        self._firsts = np.cumsum(self.counts) - self.counts

    def numbers(self, ranks: Numbers, ordinals: Numbers) -> Numbers:
        """Return the numbers of the lanes that have these ordinals among those of their ranks."""
        numbers: Numbers = self._by_rank[self._firsts[ranks] + ordinals]
        return numbers

    def before(self, positions: Numbers, rank: int) -> Numbers:
        """Count the positions before each of these in lanes of a rank."""
        first, count = self._firsts[rank], self.counts[rank]
        rounds, lane_numbers = np.divmod(positions, self.lanes)
        owned = self._by_rank[first : first + count]
        before: Numbers = rounds * count + np.searchsorted(owned, lane_numbers)
        return before


def moves(start: int, stop: int, batch: int, lanes: Lanes, cut: Cut) -> Iterator[Moves]:
    """Yield the samples that go to another rank than that of their lane, in steps from `start`.

    Each rank then has what the cut gives it, or one sample more.
    """
    if cut.is_even and lanes.lanes % cut.world == 0:
        return
    portion = max(1, MOVES_AT_ONCE // cut.world) * batch
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
    positions = rounds * lanes.lanes + lanes.numbers(givers, ordinals)
    receivers: Numbers = np.repeat(np.tile(ranks, len(totals)), missing.ravel())
    by_position = np.argsort(positions)
    return positions[by_position], givers[by_position], receivers
