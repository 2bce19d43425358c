"""Make batches of samples that come one after another, as from tars that are read from the start.

Each loader worker has samples of its own, and the workers make batches in turn.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, repeat

from torch.utils.data import IterableDataset, get_worker_info

from rackrun.errors import Problem
from rackrun.training.data.ring import Batch, Filled, Ring
from rackrun.training.data.samples import Quarantine, Seed, StoredSample, decoded
from rackrun.training.data.transforms import EpochTransforms


@dataclass(frozen=True)
class BatchStream(IterableDataset[Filled | Problem]):
    """The batches of a rank; without end, though samples may end (see `until_empty`)."""

    samples: Callable[[int, int], Iterator[StoredSample]]
    """(worker, workers) -> the samples of one of several loader workers."""
    size: int
    """Samples of a batch."""
    ring: Ring
    quarantine: Quarantine
    transforms: EpochTransforms
    start: int = 0
    """The step of the first batch."""
    epoch_steps: int = 1
    seed: Seed | None = None
    """Of what is drawn, before the number of the worker; None: images are for evaluation."""

    def __iter__(self) -> Iterator[Filled | Problem]:
        # A Problem is yielded as a value: it reaches the rank without a worker's traceback. And
        # over and over, as an empty batch is at the end of the samples: the turns of a worker that
        # ended would go to others, which would overwrite what the rank still reads.
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        try:
            yield from self._filled(number, workers)
        except Problem as problem:
            yield from repeat(problem)

    def _filled(self, worker: int, workers: int) -> Iterator[Filled]:
        samples = enumerate(self.samples(worker, workers))
        seed = None if self.seed is None else (*self.seed, worker)
        for number in count(worker, workers):
            epoch = (self.start + number) // self.epoch_steps
            # Workers read beyond the last epoch, too, into the same memory.
            transforms = self.transforms[min(epoch, len(self.transforms) - 1)]
            shape = transforms.evaluation_shape if seed is None else transforms.training_shape
            images, labels = (each.numpy() for each in self.ring.place(number, self.size, shape))
            keys = list[tuple[str, str]]()
            for _, stored, image in decoded(samples, self.size, transforms, seed, self.quarantine):
                transforms.write(images[len(keys)], image)
                labels[len(keys)] = stored.sample.label
                keys.append((stored.shard, stored.sample.key))
            yield Filled(number, shape, keys, self.quarantine.news())


def until_empty(batches: Iterator[Batch], workers: int) -> Iterator[Batch]:
    """Yield the batches of a stream whose samples end, until no worker has any left."""
    empty = 0  # one after another, as workers take turns
    for batch in batches:
        if len(batch.labels) or batch.left_out:
            empty = 0
            yield batch
        else:
            empty += 1
        if empty == max(workers, 1):
            return
