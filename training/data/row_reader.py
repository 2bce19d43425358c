"""Make batches of given rows of the index: the parts of a rank in exact epochs, and validation.

Part -> SamplePool.samples, in the order of the index -> each image in its place in the ring
"""

from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset

from rackrun.errors import Problem
from rackrun.training.data.order import Part
from rackrun.training.data.pool import SamplePool
from rackrun.training.data.ring import Filled, Ring
from rackrun.training.data.samples import Quarantine, decoded
from rackrun.training.data.transforms import EpochTransforms


@dataclass(frozen=True)
class RowReader(Dataset[Filled | Problem]):
    """What loader workers read with: it gives the batch of a part.

    The transforms of a training sample follow from seed, epoch and its position in the epoch: not
    from the rank, the worker, or where the run was interrupted.
    """

    pool: SamplePool
    transforms: EpochTransforms
    ring: Ring
    quarantine: Quarantine
    seed: int | None
    """The seed of the run; None: images are for evaluation."""

    def __getitem__(self, part: Part) -> Filled | Problem:
        try:
            return self.filled(part)
        except Problem as problem:  # as a value, it reaches the rank without a worker's traceback
            return problem

    def filled(self, part: Part) -> Filled:
        """Read and decode the samples of a part into the ring."""
        # Workers read beyond the last epoch: what nobody uses has to fit the same memory.
        transforms = self.transforms[min(part.epoch, len(self.transforms) - 1)]
        shape = transforms.evaluation_shape if self.seed is None else transforms.training_shape
        place = self.ring.place(part.number, len(part.rows), shape)
        images, labels = (each.numpy() for each in place)
        size = len(part.rows)
        keys, is_kept = [("", "")] * size, np.zeros(size, bool)
        by_row = np.argsort(part.rows, kind="stable")  # neighbors are read at once
        samples = zip(
            (by_row + part.first).tolist(), self.pool.samples(part.rows[by_row]), strict=True
        )
        seed = None if self.seed is None else (self.seed, part.epoch)
        for position, stored, image in decoded(samples, size, transforms, seed, self.quarantine):
            index = position - part.first
            transforms.write(images[index], image)
            labels[index], keys[index] = stored.sample.label, (stored.shard, stored.sample.key)
            is_kept[index] = True
        kept = np.flatnonzero(is_kept).tolist()
        if len(kept) < size:
            images[: len(kept)], labels[: len(kept)] = images[kept], labels[kept]
            keys = [keys[index] for index in kept]
        return Filled(part.number, shape, keys, self.quarantine.news(), part.rows[kept])
