"""Images by speed (--balance auto): ranks get images in proportion to how fast they compute them.

With a line of the log, all ranks learn how long each of them takes for an image. From these numbers
all find the same cut. It holds some steps later, of which no loader worker has begun anything.

A cut moves when the slowest rank would be done so much earlier that chance does not explain it.
Where the times vary by a tenth, the median of n of them varies by 0.125 / sqrt(n), and four times
that moves the cut: 11 % after 20 steps, 4 % after 160. What counts are the newest 160 under the
present cut, so that a GPU that is throttled gives images away again.

A rank computes at most --batch-size images at a time, whatever its share: a larger one is computed
in several parts. So no rank needs more memory than it has shown that it has.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from rackrun.training.config import Config
from rackrun.training.data.interface import Data
from rackrun.training.data.order import MOST_SHARE, Cut, Numbers
from rackrun.training.ranks import Ranks
from rackrun.training.step_times import Times
from rackrun.training.stragglers import Waiting

SETTLING_STEPS = 2  # under another cut: shapes that are new to a rank take it longer
FEWEST_TIMES, MOST_TIMES = 20, 160  # steps
CHANCE = 0.5  # over the square root of the number of times: what differs by less may be chance
LEAST_SHARE = 8  # a rank gets an eighth of its even part at least


def why_even(model: nn.Module, batch: int, world: int) -> str:
    """Return why steps of `batch` images on `world` ranks can only be cut evenly; empty if not."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "batch norms exchange their statistics and all ranks compute equally many parts"
    if batch < 2 * world:
        return f"{batch} images for {world} ranks leave no choice; type a larger --global-batch"
    return ""


def remedy(config: Config, balance: "Balance | None", waiting: Waiting, step: int) -> str:
    """Return what is done, or could be done, about a rank that is late by its compute."""
    if waiting.why != "compute":
        return ""
    if balance:
        return balance.remedy(waiting.rank, step)
    is_possible = config.balance == "even" and not config.synthetic
    return "--balance auto gives it fewer images" if is_possible else ""


class Balance:
    """Finds cuts by the speeds of the ranks, the same on every rank."""

    def __init__(self, ranks: Ranks, data: Data, step: int) -> None:
        """Begin after this step, under the cut that the next steps have."""
        self._rank, self._data, self._batch = ranks.rank, data, data.batch
        even = self._batch / ranks.world
        self._least = max(2, round(even / LEAST_SHARE))
        self._most = min(self._batch, int(even) * MOST_SHARE)
        self._hold(data.cut(step + data.lead), step)

    def _hold(self, cut: Cut, step: int) -> None:
        self.cut = cut
        """The newest cut, which may hold from some steps later on only."""
        self._settled = max(step, cut.step) + SETTLING_STEPS
        self._seconds: list[float] = []  # of full steps of this rank under it

    def cost(self, step: int, times: Times) -> int:
        """Return how long this rank takes for an image, in nanoseconds; 0: not known yet.

        `times` are those of its steps since the last call, up to this one.
        """
        for number, seconds in enumerate(times[:, 1].tolist(), start=step - len(times)):
            if number >= self._settled and self._data.samples_in(number) == self._batch:
                self._seconds.append(seconds)
        self._seconds = self._seconds[-MOST_TIMES:]
        if len(self._seconds) < FEWEST_TIMES:
            return 0
        # The median: a step that something else interrupted says nothing of how fast a GPU is.
        seconds = float(np.median(self._seconds)) / self.counts[self._rank]
        return max(1, round(seconds * 1e9))

    def next_cut(self, step: int, costs: npt.NDArray[np.int64]) -> Cut | None:
        """Return the cut that all ranks go on with after this step, None if it stays.

        `costs` are those of all ranks.
        """
        if not costs.all():
            return None
        slowest = (self.cut.sizes(self._batch) * costs).max()
        worth = slowest / (1 + CHANCE / len(self._seconds) ** 0.5)
        if self._batch / (1 / costs).sum() >= worth:  # of images that could be cut
            return None
        better = fastest_counts(costs, self._batch, self._least, self._most)
        if (better * costs).max() >= worth:
            return None
        self._hold(Cut.into(better, step + self._data.lead), step)
        return self.cut

    @property
    def counts(self) -> list[int]:
        """The samples that each rank gets of a full step, by the newest split."""
        counts: list[int] = self.cut.sizes(self._batch).tolist()
        return counts

    def remedy(self, rank: int, step: int) -> str:
        """Return what is done about a rank that is late by its compute."""
        count = self.counts[rank]
        since = f" from step {self.cut.step + 1} on" if self.cut.step > step else ""
        limit = ", the fewest that it may" if count == self._least else ""
        return f"it gets {count} of {self._batch} images a step{since}{limit}"


def fastest_counts(costs: npt.NDArray[Any], batch: int, least: int, most: int) -> Numbers:
    """Return how many of `batch` images each rank gets so that the slowest is done the soonest.

    `costs` is the time that each needs for an image.
    """
    counts: Numbers = np.full(costs.size, least)
    # One by one, to the rank that is done the soonest with one more.
    for _ in range(batch - int(counts.sum())):
        counts[np.where(counts < most, (counts + 1) * costs, np.inf).argmin()] += 1
    return counts
