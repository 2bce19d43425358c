"""How steps are cut among ranks: evenly, or with more samples for some of them.

A rank owns lanes in proportion to its samples of a full step, spread evenly over the round of the
lanes. What a step then gives it too many or too few of changes ranks (`evening`), so that counts
follow from the cut alone.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.data.order.epoch import Numbers

MOST_SHARE = 3
"""Times of its even part that a rank gets at most: loader workers have room for so many images."""


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
        """Return the cut that gives each rank so many samples of a full step, one at least."""
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
        """Return the least samples of each rank in steps of so many: (…, ranks).

        Where a step has more than that, some ranks get one sample more.
        """
        each = np.asarray(totals, np.int64)[..., None]
        least = (each >= self.world).astype(np.int64)
        fewest: Numbers = least + (each - least * self.world) * self._shares // self._whole
        return fewest

    def most(self, totals: npt.ArrayLike) -> Numbers:
        """Return the most samples of each rank in steps of so many: (…, ranks)."""
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
    """Which lanes belong to which rank, by their places in a round of all lanes."""

    def __init__(self, cut: Cut, lanes: int) -> None:
        self.lanes = lanes
        self.counts = _lane_counts(cut, lanes)
        """By rank, its lanes."""
        ranks = np.arange(cut.world).repeat(self.counts)
        ordinals = np.arange(lanes) - (np.cumsum(self.counts) - self.counts).repeat(self.counts)
        # The nth of k lanes belongs at (n + 1/2) / k of the round: compared as whole numbers.
        turns = np.argsort((2 * ordinals + 1) / self.counts.repeat(self.counts), kind="stable")
        self.owners = ranks[turns]
        """By place, the rank."""
        self.ordinals = ordinals[turns]
        """By place, which of its rank's lanes it is."""
        self.places = np.argsort(turns)
        """The places of the first rank's lanes, then of the next one's."""
        self._firsts = np.cumsum(self.counts) - self.counts

    def place(self, rank: Numbers, ordinal: Numbers) -> Numbers:
        """Return the places of these lanes of ranks."""
        place: Numbers = self.places[self._firsts[rank] + ordinal]
        return place

    def before(self, positions: Numbers, rank: int) -> Numbers:
        """Count the positions before each of these in lanes of a rank."""
        first, count = self._firsts[rank], self.counts[rank]
        rounds, places = np.divmod(positions, self.lanes)
        owned = self.places[first : first + count]
        before: Numbers = rounds * count + np.searchsorted(owned, places)
        return before


def _lane_counts(cut: Cut, lanes: int) -> Numbers:
    """Return the lanes of each rank, in proportion to its samples of a full step."""
    samples = np.array(cut.weights, np.int64) + 1
    counts, rests = np.divmod(lanes * samples, samples.sum())
    counts[np.flatnonzero(rests)[: lanes - int(counts.sum())]] += 1
    return counts
