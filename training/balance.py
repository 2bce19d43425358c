"""Images by speed (--balance auto): ranks get images in proportion to how fast they compute them.

Whenever the ranks look for stragglers, all of them learn how long forward and backward took on each
in the last steps (training.stragglers). From these times all find the same cut. It holds some steps
later, of which no loader worker has begun anything.

A cut moves when the slowest rank would be done so much earlier that chance does not explain it.
Where the times vary by a tenth, the median of n of them varies by 0.125 / sqrt(n), and four times
that moves the cut: 11 % after 20 steps, 4 % after 200.

A rank computes at most --batch-size images at a time, whatever its share: a larger one is computed
in several parts. So no rank needs more memory than it has shown that it has.
"""

import numpy as np
from torch import nn

from rackrun.training.data.order import MOST_SHARE, Cut, Numbers, Steps
from rackrun.training.step_times import Times

FEWEST_STEPS = 10  # under a cut, to judge it
CHANCE = 0.5  # over the square root of the number of steps: what differs by less may be chance
LEAST_SHARE = 8  # a rank gets an eighth of its even part at least


def why_even(model: nn.Module, batch: int, world: int) -> str:
    """Return why steps of `batch` images on `world` ranks can only be cut evenly; empty if not."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "batch norms exchange their statistics and all ranks compute equally many parts"
    if batch < 2 * world:
        return f"{batch} images for {world} ranks leave no choice; type a larger --global-batch"
    return ""


class Balance:
    """Finds cuts by the speeds of the ranks, the same on every rank."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        even = steps.batch / steps.world
        self._least = max(2, round(even / LEAST_SHARE))
        self._most = min(steps.batch, int(even) * MOST_SHARE)

    @property
    def counts(self) -> list[int]:
        """The samples that each rank gets of a full step, by the newest cut."""
        counts: list[int] = self._steps.newest_cut.sizes(self._steps.batch).tolist()
        return counts

    def remedy(self, rank: int) -> str:
        """Return what is done about a rank that is late by its compute."""
        return f"it gets {self.counts[rank]} of {self._steps.batch} images a step"

    def recut(self, step: int, compute: Times) -> bool:
        """Cut later steps anew if ranks are unlike; `step` is done, as the last of those timed.

        `compute`: the seconds of forward and backward, (ranks, steps).
        """
        steps, newest = self._steps, self._steps.newest_cut
        numbers = range(step - compute.shape[1], step)
        sizes = np.stack([newest.sizes(steps.samples_in(number)) for number in numbers], 1)
        judged = (np.array(numbers) >= newest.step) & ((compute > 0) & (sizes > 0)).all(axis=0)
        if judged.sum() < FEWEST_STEPS:
            return False
        # Medians: a step that something else interrupted says nothing of how fast a GPU is.
        costs = np.median(compute[:, judged] / sizes[:, judged], axis=1)
        counts = newest.sizes(steps.batch)
        better = fastest_counts(costs, steps.batch, self._least, self._most)
        if (counts * costs).max() / (better * costs).max() - 1 <= CHANCE / judged.sum() ** 0.5:
            return False
        steps.recut(Cut.into(better, step + steps.lead))
        return True


def fastest_counts(costs: Times, batch: int, least: int, most: int) -> Numbers:
    """Return how many of `batch` images each rank gets so that the slowest is done the soonest.

    `costs` is the time that each needs for an image.
    """
    counts: Numbers = np.full(costs.size, least)
    # One by one, to the rank that is done the soonest with one more.
    for _ in range(batch - int(counts.sum())):
        counts[np.where(counts < most, (counts + 1) * costs, np.inf).argmin()] += 1
    return counts
