"""The steps of exact epochs: every sample once, for any number of ranks and workers.

The position of a run is one integer, the step.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import numpy as np

from rackrun.training.data.choice import EpochRows
from rackrun.training.data.order import MOST_SHARE, Cut, Rows, epoch_order
from rackrun.training.data.pool import SamplePool
from rackrun.training.data.row_reader import Part
from rackrun.training.settings.data import DataSettings


@dataclass(frozen=True)
class Steps:
    """The steps of a run over a pool of samples, the same for all ranks.

    `step // epoch_steps` is the epoch, and within an epoch each step takes the next `batch` samples
    of the order, the last one the rest.
    """

    pool: SamplePool
    epoch_rows: EpochRows
    seed: int
    batch: int
    """Samples per step, over all ranks."""
    repeats: int = 1
    """How often an epoch has each of its images (--aug-repeats): a part of them, in turn."""

    @property
    def samples(self) -> int:
        """Samples of an epoch, copies counted."""
        return self._images * self.repeats

    @property
    def _images(self) -> int:
        return -(-self.epoch_rows.samples // self.repeats)

    @property
    def epoch_steps(self) -> int:
        """Steps that make an epoch."""
        return -(-self.samples // self.batch)

    def samples_in(self, step: int) -> int:
        """Return the number of samples of a step over all ranks."""
        return min(self.batch, self.samples - step % self.epoch_steps * self.batch)

    def largest_part(self, world: int, config: DataSettings) -> int:
        """Return the samples of the largest batch that one of so many ranks may get."""
        even = -(-self.batch // world)
        return min(self.batch, even * MOST_SHARE) if config.balance == "auto" else even

    def order(self, epoch: int) -> Rows:
        """Return the row of every sample of an epoch."""
        turn, part = divmod(epoch, self.repeats)
        rows = self.epoch_rows.rows(turn)
        order = epoch_order(self.pool.index, rows, self.seed, turn, self.batch)
        if self.repeats == 1:
            return order
        images = np.arange(part * self._images, (part + 1) * self._images)
        repeated = np.take(order, images, mode="wrap").repeat(self.repeats)
        # The copies of an image are in one step, and on different ranks, as torchvision has them.
        places = np.arange(repeated.size)
        return repeated[np.lexsort((places % self.repeats, places // self.batch))]

    def of_rank(self, rank: int, start: int, cut: Callable[[int], Cut]) -> Iterator[Part]:
        """Yield the part of one rank of each step from one on, without end."""
        begun = start // self.epoch_steps
        with ThreadPoolExecutor(1) as planner:  # plans an epoch while the one before it trains
            planned = planner.submit(self.order, begun)
            for epoch in count(begun):
                order, planned = planned.result(), planner.submit(self.order, epoch + 1)
                first = epoch * self.epoch_steps
                for step in range(max(start, first), first + self.epoch_steps):
                    samples = self.samples_in(step)
                    edges = (step - first) * self.batch + cut(step).edges(samples)
                    begin, end = int(edges[rank]), int(edges[rank + 1])
                    yield Part(step - start, epoch, begin, order[begin:end])
