"""Read the validation set: every sample once for any number of ranks, without padding.

The ranks take neighbouring parts of the index, a part is cut into batches of which only the last
is short, and each batch is read by itself.

    SamplePool.samples -> filled
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from rackrun.errors import Problem, UsageError
from rackrun.shards.source import Source
from rackrun.training.data.loader import loaded, on_device, worker_count
from rackrun.training.data.pool import SamplePool
from rackrun.training.data.samples import Batch, LeftOut, Quarantine, filled
from rackrun.training.data.slots import room_for
from rackrun.training.data.transforms import TransformsOfEpoch
from rackrun.training.ranks import Numbers, Ranks, part_of
from rackrun.training.settings.data import DataSettings

VALIDATION = "val"


class Validation(Dataset[Batch | Problem]):
    """The validation samples of a rank, if there are any: batches that can be read in any order."""

    def __init__(
        self,
        config: DataSettings,
        ranks: Ranks,
        transforms: TransformsOfEpoch,
        sources: Sequence[Source],
    ) -> None:
        split = config.eval_split
        splits = {each.name for source in sources for each in source.manifest.splits}
        if split != VALIDATION and split not in splits:
            raise UsageError(
                f"{sources[0].location}: has no split {split!r}, only {', '.join(sorted(splits))};"
                " choose one with --eval-split"
            )
        having = [source for source in sources if split in _splits_of(source)]
        self._pool = SamplePool(tuple(having), split)
        self.has_evaluation = self._pool.size > 0
        self._config = config
        self._classes = len(sources[0].manifest.classes)
        self._transforms = transforms
        self._rows = part_of(ranks, self._pool.size)
        self._device = ranks.device
        self._workers = worker_count(config, ranks)
        self._quarantine = Quarantine(config)
        self.left_out = LeftOut(config)
        """Those of the rank, in its training as well."""

    def class_sizes(self) -> Numbers:
        """Return the samples of each class, those of all ranks."""
        if not self.has_evaluation:
            return np.zeros(self._classes, np.int64)
        return np.bincount(self._pool.index["label"], minlength=self._classes)

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's part, in the order of the index."""
        for source in self._pool.sources:
            source.index(self._config.eval_split)  # read here, once: workers get it with this
        batches = loaded(self, self._workers, pin=self._device.type == "cuda")
        return self.left_out.counted(on_device(batches, self._device))

    def grid(self, count: int, rows: Sequence[int] = ()) -> Batch | None:
        """Return the images of these rows, or some at even distances, if there are any."""
        if not self.has_evaluation:
            return None
        # A set: where there are fewer samples than are asked for, each comes once.
        rows = rows or sorted({self._pool.size * number // count for number in range(count)})
        return self._batch(np.array(rows))

    def __len__(self) -> int:
        return -(-len(self._rows) // self._config.batch_size)

    def __getitem__(self, number: int) -> Batch | Problem:
        size = self._config.batch_size
        try:
            return self._batch(np.array(self._rows[number * size : (number + 1) * size]))
        except Problem as problem:  # as a value, it reaches the rank without a worker's traceback
            return problem

    def _batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        # At full size, though images of the first epochs may be smaller. Made here, in the worker:
        # a task's function can be sent to it, but what that returns perhaps cannot.
        transforms = self._transforms(self._config.epochs - 1)
        samples = self._pool.samples(rows)

        images = room_for(len(rows), *transforms.evaluation_shape)
        kept = filled(images, enumerate(samples), transforms, None, self._quarantine)
        return Batch(
            images[: len(kept)].permute(0, 3, 1, 2),
            torch.tensor([sample.label for sample in kept], dtype=torch.int64),
            self._quarantine.news(),
            torch.from_numpy(rows[[sample.number for sample in kept]]),
            keys=tuple((sample.shard, sample.key) for sample in kept),
        )


def _splits_of(source: Source) -> set[str]:
    return {split.name for split in source.manifest.splits if split.samples}
