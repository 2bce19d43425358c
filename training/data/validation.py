"""Read the validation set: every sample once for any number of ranks, without padding.

The ranks take neighboring parts of the index, a part is cut into batches of which only the last
is short, and each batch is read by itself (training.data.row_reader).
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from rackrun.errors import UsageError
from rackrun.shards.source import Source
from rackrun.training.data.loader import Loader
from rackrun.training.data.order import Part
from rackrun.training.data.pool import SamplePool
from rackrun.training.data.ring import Batch, Ring
from rackrun.training.data.row_reader import RowReader
from rackrun.training.data.transforms import Transforms
from rackrun.training.ranks import Numbers, part_of

VALIDATION = "val"


class Validation:
    """The validation samples of a rank, if there are any."""

    def __init__(self, loader: Loader, transforms: Transforms, sources: Sequence[Source]) -> None:
        split = loader.config.eval_split
        splits = {each.name for source in sources for each in source.manifest.splits}
        if split != VALIDATION and split not in splits:
            raise UsageError(
                f"{sources[0].location}: has no split {split!r}, only {', '.join(sorted(splits))};"
                " choose one with --eval-split"
            )
        having = [source for source in sources if split in _splits_of(source)]
        self._pool = SamplePool(tuple(having), split)
        self.has_evaluation = self._pool.size > 0
        self._loader, self._transforms = loader, transforms
        self._classes = len(sources[0].manifest.classes)

    def class_sizes(self) -> Numbers:
        """Return the samples of each class, those of all ranks."""
        if not self.has_evaluation:
            return np.zeros(self._classes, np.int64)
        return np.bincount(self._pool.index["label"], minlength=self._classes)

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's part, in the order of the index."""
        loader, size = self._loader, self._loader.config.batch_size
        for source in self._pool.sources:
            source.index(self._pool.split)  # read here, once: workers get it with this
        rows = part_of(loader.ranks, self._pool.size)
        parts = [
            Part(number, 0, 0, np.array(rows[first : first + size], np.int32))
            for number, first in enumerate(range(0, len(rows), size))
        ]
        ring = loader.ring(size, self._transforms.evaluation_shape)
        return loader.batches(self._reader(ring), ring, parts)

    def grid(self, count: int, rows: Sequence[int] = ()) -> Batch | None:
        """Return the images of these rows, or some at even distances, if there are any."""
        if not self.has_evaluation:
            return None
        # A set: where there are fewer samples than are asked for, each comes once.
        rows = rows or sorted({self._pool.size * number // count for number in range(count)})
        ring = Ring(0, len(rows), math.prod(self._transforms.evaluation_shape))
        return ring.batch(self._reader(ring).filled(Part(0, 0, 0, np.array(rows, np.int32))))

    def _reader(self, ring: Ring) -> RowReader:
        return RowReader(self._pool, [self._transforms], ring, self._loader.quarantine, seed=None)


def _splits_of(source: Source) -> set[str]:
    return {split.name for split in source.manifest.splits if split.samples}
