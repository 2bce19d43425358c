"""Open a data set for training and validation: what the training loop sees of it.

    Resampled   shards drawn with replacement           training.data.resampled
    Exact       every sample once in an epoch           training.data.order
    PlainData   tars without an index, drawn likewise   training.data.plain
    Synthetic   the same random images at every step    nothing is read

Validation is always complete (training.data.validation). Batches leave loader workers as uint8.
Everything random follows from the seed and the place in the run: the same run sees the same images,
also after an interruption.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from rackrun.data_location import are_plain_tars
from rackrun.errors import UsageError
from rackrun.shards.cache_filler import CacheFiller
from rackrun.shards.resize import Resize
from rackrun.training.data.choice import chosen
from rackrun.training.data.interface import Data
from rackrun.training.data.loader import Loader, on_device
from rackrun.training.data.order import MOST_SHARE, EpochOrder, Steps, parts_of_rank
from rackrun.training.data.plain import PlainData
from rackrun.training.data.pool import (
    TRAIN,
    SamplePool,
    digest_of,
    sources_of,
)
from rackrun.training.data.resampled import resampled_batches, samples_of_shard
from rackrun.training.data.ring import AHEAD, HELD, Batch
from rackrun.training.data.row_reader import RowReader
from rackrun.training.data.transforms import EpochTransforms, Transforms
from rackrun.training.data.validation import Validation
from rackrun.training.ranks import Numbers, Ranks, part_of
from rackrun.training.settings.data import DataSettings


def open_data(
    config: DataSettings,
    ranks: Ranks,
    transforms: EpochTransforms,
    task: str,
    synthetic_classes: int,
) -> Data:
    """Return the data that the settings ask for; UsageError when they name none.

    `transforms` are those of each epoch; `task` is its name, for the message; `synthetic_classes`
    are those of --synthetic.
    """
    if config.synthetic:
        return Synthetic(config, transforms[0], synthetic_classes, ranks)
    config.require_data(task)
    if are_plain_tars(config.data):
        return PlainData(config, ranks, transforms)
    return (Exact if config.exact_epochs else Resampled)(config, ranks, transforms)


class StoredData(Data):
    """Shards, and every sample of them once for validation."""

    def __init__(self, config: DataSettings, ranks: Ranks, transforms: EpochTransforms) -> None:
        super().__init__()
        self._batch = config.global_batch or config.batch_size * ranks.world
        if self._batch < ranks.world:
            raise UsageError(
                f"--global-batch {self._batch} has fewer samples than {ranks.world} ranks"
            )
        sources = sources_of(config)
        self._pool = SamplePool(sources)
        self._loader = Loader(config, ranks)
        self._validation = Validation(self._loader, transforms[-1], sources)
        fetched = sources if ranks.local_rank == 0 else ()  # one rank of a host fetches
        self.cache = CacheFiller(fetched, (TRAIN, config.eval_split), int(config.cache_size * 1e9))
        manifests = [source.manifest for source in sources]
        self.classes, self.dataset = manifests[0].classes, manifests[0].dataset
        self.conversion, self.upright = Resize.of(manifests[0]), manifests[0].upright
        self.digest = digest_of(config, sources)
        self.versions = {source.location: source.manifest.digest for source in sources}
        self.rows = self._pool.size
        self.has_evaluation = self._validation.has_evaluation
        self._transforms = transforms

    def evaluation(self) -> Iterator[Batch]:
        """Yield this rank's part of the validation set, in the order of the index."""
        return self._validation.batches()

    def evaluated_sizes(self) -> Numbers:
        """Return the samples of each class in the validation set."""
        return self._validation.class_sizes()

    def grid(self, count: int, rows: Sequence[int] = ()) -> Batch | None:
        """Return validation images, those of these rows or at even distances."""
        return self._validation.grid(count, rows)


class Resampled(StoredData):
    """Training on shards drawn with replacement, by each loader worker of each rank."""

    def __init__(self, config: DataSettings, ranks: Ranks, transforms: EpochTransforms) -> None:
        super().__init__(config, ranks, transforms)
        samples = config.epoch_samples or self.rows
        epoch_steps = config.steps_per_epoch or max(samples // self._batch, 1)
        self.steps = Steps(epoch_steps * self._batch, self._batch, ranks.world)

    def training(self, start: int) -> Iterator[Batch]:
        """Yield this rank's batches from a step on: other ones than a run that began earlier."""
        source = self._pool.sources[0]
        source.index(TRAIN)  # read here, once: workers get it with the source
        names = [shard.name for shard in source.manifest.split(TRAIN).shards]
        samples = partial(samples_of_shard, source)
        return resampled_batches(
            self._loader, names, samples, self._transforms, self.steps.per_epoch, start
        )

    def class_sizes(self) -> Numbers:
        """Return the samples of each class in the training set."""
        labels = self._pool.index["label"]
        return np.bincount(labels, minlength=len(self.classes))


class Exact(StoredData):
    """Training on every sample once in an epoch, or as often as its weight says."""

    def __init__(self, config: DataSettings, ranks: Ranks, transforms: EpochTransforms) -> None:
        super().__init__(config, ranks, transforms)
        choice = chosen(config, self._pool.index["label"], self.classes)
        self._order = EpochOrder(
            self._pool.index, choice, config.seed, self._batch, config.aug_repeats
        )
        workers = self._loader.workers
        most = ranks.all_reduce_max(workers) if ranks.connected else workers
        lead = AHEAD * most + HELD
        self.steps = Steps(self._order.samples, self._batch, ranks.world, lead)

    def training(self, start: int) -> Iterator[Batch]:
        """Yield this rank's batches from a step on."""
        loader, transforms = self._loader, self._transforms
        config, ranks = loader.config, loader.ranks
        largest = -(-self._batch // ranks.world)
        if config.balance == "auto":
            largest = min(self._batch, largest * MOST_SHARE)
        ring = loader.ring(largest, *(each.training_shape for each in transforms))
        reader = RowReader(self._pool, transforms, ring, loader.quarantine, config.seed)
        parts = parts_of_rank(self._order, self.steps, ranks.rank, start)
        return loader.batches(reader, ring, parts)

    def class_sizes(self) -> Numbers:
        """Return the samples of each class in the first epoch."""
        labels = self._pool.index["label"][self._order.epoch_rows.rows(0)]
        return np.bincount(labels, minlength=len(self.classes))


class Synthetic(Data):
    """The same random images at every step: the loop without a loader."""

    has_evaluation = True

    def __init__(
        self, config: DataSettings, transforms: Transforms, classes: int, ranks: Ranks
    ) -> None:
        super().__init__()
        self.classes = tuple(f"class {number}" for number in range(classes))
        self.digest = self.dataset = "synthetic"
        self.rows = size = config.global_batch or config.batch_size * ranks.world
        self.steps = Steps((config.steps_per_epoch or 100) * size, size, ranks.world)
        random = torch.Generator().manual_seed(config.seed + ranks.rank)
        shape = (
            len(part_of(ranks, size)),
            transforms.size,
            transforms.size,
            transforms.channels,
        )
        images = torch.randint(256, shape, dtype=torch.uint8, generator=random)
        labels = torch.randint(classes, shape[:1], generator=random)
        batch = Batch(images.permute(0, 3, 1, 2), labels)
        self._batch = next(on_device(iter([batch]), ranks.device))

    def training(self, start: int) -> Iterator[Batch]:
        """Yield the one batch, without end."""
        while True:
            yield self._batch

    def evaluation(self) -> Iterator[Batch]:
        """Yield the one batch, once."""
        yield self._batch
