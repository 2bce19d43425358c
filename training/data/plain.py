"""Train and evaluate on tars without an index: their shards drawn, validation each image once."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from rackrun.data_location import expanded
from rackrun.shards.class_names import named_classes
from rackrun.training.data.batch_stream import BatchStream, until_empty
from rackrun.training.data.interface import Data
from rackrun.training.data.loader import Loader
from rackrun.training.data.order import Steps
from rackrun.training.data.resampled import resampled_batches
from rackrun.training.data.ring import Batch
from rackrun.training.data.samples import StoredSample
from rackrun.training.data.tars import Labels, TarPart, part_of, samples_in
from rackrun.training.data.transforms import EpochTransforms, Transforms
from rackrun.training.ranks import Ranks
from rackrun.training.settings.data import DataSettings


class PlainData(Data):
    """Training on tars drawn with replacement, and each image of --eval-data once."""

    def __init__(self, config: DataSettings, ranks: Ranks, transforms: EpochTransforms) -> None:
        super().__init__()
        self.classes = _classes(config, ranks)
        self._labels = Labels(self.classes, config.label_field)
        self._names = expanded(config.data)
        self._loader, self._transforms = Loader(config, ranks), transforms
        self.rows, batch = config.epoch_samples, config.batch_size * ranks.world
        self.steps = Steps(max(self.rows // batch, 1) * batch, batch, ranks.world)
        self.dataset, self.tars = "tars", len(self._names)
        named = [self.classes, [name.rpartition("/")[2] for name in self._names]]
        self.digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()
        self.has_evaluation = bool(config.eval_data)
        self._evaluation = PlainValidation(self._loader, transforms[-1], self._labels)

    def training(self, start: int) -> Iterator[Batch]:
        """Yield this rank's batches from a step on: other ones than a run that began earlier."""
        samples = partial(samples_in, labels=self._labels)
        return resampled_batches(
            self._loader, self._names, samples, self._transforms, self.steps.per_epoch, start
        )

    def evaluation(self) -> Iterator[Batch]:
        """Yield this rank's part of the validation images."""
        return self._evaluation.batches()


def _classes(config: DataSettings, ranks: Ranks) -> tuple[str, ...]:
    # As the first rank knows them.
    if config.num_classes:
        return tuple(map(str, range(config.num_classes)))
    names = ranks.on_first(lambda: list(named_classes(Path(config.classes))))
    return tuple(names)


class PlainValidation:
    """The images of tars without an index, each once for any number of ranks and workers."""

    def __init__(self, loader: Loader, transforms: Transforms, labels: Labels) -> None:
        tars = expanded(loader.config.eval_data) if loader.config.eval_data else []
        ranks = loader.ranks
        self._parts = part_of([TarPart(tar) for tar in tars], ranks.rank, ranks.world)
        self._loader, self._transforms, self._labels = loader, transforms, labels

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's part."""
        loader, transforms = self._loader, self._transforms
        config = loader.config
        ring = loader.ring(config.batch_size, transforms.evaluation_shape)
        stream = BatchStream(
            partial(_read, self._parts, self._labels),
            config.batch_size,
            ring,
            loader.quarantine,
            [transforms],
        )
        return until_empty(loader.batches(stream, ring), loader.workers)


def _read(
    parts: Sequence[TarPart], labels: Labels, worker: int, workers: int
) -> Iterator[StoredSample]:
    for tar, first, every in part_of(parts, worker, workers):
        yield from islice(samples_in(tar, labels), first, None, every)
