"""Exact epochs for a DataLoader of any script: `from rackrun import ExactSampler`."""

import os
from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from rackrun.errors import UsageError


class ExactSampler(Sampler[list[int]]):
    """What `DataLoader(batch_sampler=…)` takes: every sample once an epoch, on any number of ranks.

    An epoch has as many steps as batches of `batch` samples are needed, and these share its
    samples evenly: there is no short step at its end, and no rank is without a sample. The samples
    of a step follow from the seed and the number of the step. So the step is all that a checkpoint
    needs, also for a resume on another number of ranks.

    Each walk through the sampler goes on from `step` to the end of its epoch.
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        *,
        seed: int = 0,
        step: int = 0,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        """Sample a data set of so many samples in steps of `batch`, over all ranks.

        `step` is the number of steps that are done, of all epochs. Rank and world size are those
        that torchrun sets, unless given. UsageError if a step has fewer samples than ranks.
        """
        self.samples, self.seed, self.step = samples, seed, step
        self.rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        self.world = int(os.environ.get("WORLD_SIZE", 1)) if world is None else world
        self.epoch_steps = -(-samples // max(batch, 1))
        """Steps of an epoch."""
        if batch < 1 or samples < self.world * self.epoch_steps:
            raise UsageError(
                f"{samples} samples in steps of {batch}: some have fewer than {self.world} ranks"
            )

    @property
    def epoch(self) -> int:
        """The epoch that the next step is in, from 0."""
        return self.step // self.epoch_steps

    def samples_in(self, step: int) -> int:
        """Return the samples of a step over all ranks, to divide the sum of their losses by."""
        within = step % self.epoch_steps
        return self._edge(within + 1) - self._edge(within)

    def _edge(self, step: int) -> int:
        return self.samples * step // self.epoch_steps

    def __len__(self) -> int:
        return self.epoch_steps - self.step % self.epoch_steps

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = divmod(self.step, self.epoch_steps)
        words = np.random.PCG64((self.seed, epoch)).random_raw(self.samples)
        order = np.argsort(words, kind="stable")
        for step in range(first, self.epoch_steps):
            part = np.array_split(order[self._edge(step) : self._edge(step + 1)], self.world)
            yield part[self.rank].tolist()
        self.step = (epoch + 1) * self.epoch_steps
