"""Train and evaluate on tars without an index: their shards drawn, validation each image once."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from rackrun.data_location import expanded
from rackrun.errors import Problem, UsageError
from rackrun.shards.cache_filler import CacheFiller
from rackrun.training.data.interface import Data
from rackrun.training.data.loader import loaded, on_device, with_problems, worker_count
from rackrun.training.data.resampled import resampled_batches
from rackrun.training.data.samples import Batch, LeftOut, Quarantine, StoredSample, filled
from rackrun.training.data.slots import room_for
from rackrun.training.data.tars import Labels, TarPart, named_classes, part_of, samples_in
from rackrun.training.data.transforms import TransformsOfEpoch
from rackrun.training.ranks import Numbers, Ranks
from rackrun.training.settings.data import DataSettings


class PlainTars(NamedTuple):
    """Tars without an index, as what shards are drawn from."""

    names: tuple[str, ...]
    labels: Labels

    def samples(self, name: str) -> Iterator[StoredSample]:
        """Yield the samples of a tar, in order."""
        return samples_in(name, self.labels)


class PlainData(Data):
    """Training on tars drawn with replacement, and each image of --eval-data once."""

    def __init__(self, config: DataSettings, ranks: Ranks, transforms: TransformsOfEpoch) -> None:
        super().__init__(ranks)
        self.classes = _classes(config, ranks)
        labels = Labels(self.classes, config.label_field)
        self._tars = PlainTars(tuple(expanded(config.data)), labels)
        self._config, self._ranks, self._transforms = config, ranks, transforms
        self.batch, self.rows = config.batch_size * ranks.world, config.epoch_samples
        self.epoch_steps = max(self.rows // self.batch, 1)
        self.dataset, self.tars, self.versions = "tars", len(self._tars.names), {}
        named = [self.classes, [name.rpartition("/")[2] for name in self._tars.names]]
        self.digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()
        self.cache = CacheFiller((), ())
        self.has_evaluation = bool(config.eval_data)
        self._evaluation = PlainValidation(config, ranks, transforms, labels)

    def training(self, start: int) -> Iterator[Batch]:
        """Yield this rank's batches from a step on: other ones than a run that began earlier."""
        batches = resampled_batches(
            self._config, self._tars, self._transforms, self._ranks, self.epoch_steps, start
        )
        return self._evaluation.left_out.counted(batches)

    def evaluation(self) -> Iterator[Batch]:
        """Yield this rank's part of the validation images."""
        return self._evaluation.batches()

    def grid(self, count: int, rows: Sequence[int] = ()) -> Batch | None:
        """Return None: no index says where an image is."""
        return None

    def class_sizes(self) -> Numbers:
        """Return one sample of each class: how many there are is not known."""
        return np.ones(len(self.classes), np.int64)


def _classes(config: DataSettings, ranks: Ranks) -> tuple[str, ...]:
    """Return the classes, as the first rank knows them; UsageError on all ranks if it does not."""
    if config.num_classes:
        return tuple(map(str, range(config.num_classes)))
    answer = b""
    if ranks.first:
        try:
            answer = json.dumps({"classes": named_classes(config.classes)}).encode()
        except UsageError as problem:
            answer = json.dumps({"problem": str(problem)}).encode()
    told = json.loads(ranks.broadcast_bytes(answer if ranks.first else None, 0))
    if "problem" in told:
        raise UsageError(told["problem"])
    return tuple(told["classes"])


@dataclass(frozen=True)
class _Stream(IterableDataset[Batch | Problem]):
    """The batches of a rank's part, made by its loader workers."""

    config: DataSettings
    parts: list[TarPart]
    labels: Labels
    transforms: TransformsOfEpoch

    def __iter__(self) -> Iterator[Batch | Problem]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return with_problems(self._batches(part_of(self.parts, number, workers)))

    def _batches(self, parts: Sequence[TarPart]) -> Iterator[Batch]:
        transforms, quarantine = self.transforms(self.config.epochs - 1), Quarantine(self.config)
        samples = enumerate(
            sample
            for tar, first, every in parts
            for sample in islice(samples_in(tar, self.labels), first, None, every)
        )

        is_full = True
        while is_full:
            images = room_for(self.config.batch_size, *transforms.evaluation_shape)
            kept = filled(images, samples, transforms, None, quarantine)
            is_full = len(kept) == len(images)
            yield Batch(
                images[: len(kept)].permute(0, 3, 1, 2),
                torch.tensor([sample.label for sample in kept], dtype=torch.int64),
                quarantine.news(),
                keys=tuple((sample.shard, sample.key) for sample in kept),
            )


class PlainValidation:
    """The images of tars without an index, each once for any number of ranks and workers."""

    def __init__(
        self, config: DataSettings, ranks: Ranks, transforms: TransformsOfEpoch, labels: Labels
    ) -> None:
        tars = expanded(config.eval_data) if config.eval_data else []
        parts = part_of([TarPart(tar) for tar in tars], ranks.rank, ranks.world)
        self._stream = _Stream(config, parts, labels, transforms)
        self._device, self._workers = ranks.device, worker_count(config, ranks)
        self.left_out = LeftOut(config)
        """Those of the rank, in its training as well."""

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's part."""
        batches = loaded(self._stream, self._workers, pin=self._device.type == "cuda")
        kept = (batch for batch in batches if len(batch.labels) or batch.left_out)
        return self.left_out.counted(on_device(kept, self._device))
