"""The samples that a run trains on: one index over one shard folder or several of them."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rackrun.errors import DataError
from rackrun.shapes import Misshapen, shaped
from rackrun.shards.index import Manifest
from rackrun.shards.open import open_source
from rackrun.shards.resize import Resize
from rackrun.shards.source import Source
from rackrun.training.data.mixture import (
    BALANCED,
    Mixture,
    balanced,
    class_number,
    class_weights_in,
    mixture,
    weights_in,
)
from rackrun.training.data.order import Rows
from rackrun.training.data.samples import StoredSample, stored_samples
from rackrun.training.ranks import Ranks
from rackrun.training.settings.data import DataSettings

TRAIN = "train"


@dataclass(frozen=True)
class SamplePool:
    """The training split of shard folders with the same classes, as if it were one."""

    sources: tuple[Source, ...]

    def __reduce__(self) -> tuple[type["SamplePool"], tuple[tuple[Source, ...]]]:
        return SamplePool, (self.sources,)  # without the joined index

    @property
    def index(self) -> npt.NDArray[np.void]:
        """The rows of all folders; shard numbers run on from folder to folder."""
        # The index of one folder stays where loader workers map it: no copy is kept here.
        return self.sources[0].index(TRAIN) if len(self.sources) == 1 else self._joined

    @cached_property
    def _joined(self) -> npt.NDArray[np.void]:
        parts = [source.index(TRAIN).copy() for source in self.sources]
        for part, base in zip(parts, self._bases, strict=False):
            part["shard"] += np.uint32(base)
        return np.concatenate(parts)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of every folder."""
        return self.sources[0].manifest.classes

    def digest(self, config: DataSettings) -> str:
        """Return the identity of the training data: the folders, and the choice from them."""
        folders = [source.manifest.digest for source in self.sources]
        if not config.chooses:
            return folders[0]
        chosen = [
            config.only_classes,
            config.class_weights,
            config.max_train_samples,
            # Folders are identified by their digests, wherever they lie.
            [*weights_in("--extra-data", config.extra_data).values()],
        ]
        return hashlib.sha256(json.dumps([folders, *chosen]).encode()).hexdigest()

    @property
    def versions(self) -> dict[str, str]:
        """The digest of each folder, by its location."""
        return {source.location: source.manifest.digest for source in self.sources}

    @property
    def folder_of_row(self) -> npt.NDArray[np.intp]:
        """The number of its folder, by row."""
        return np.searchsorted(self._bases[1:], self.index["shard"], side="right")

    def samples(self, rows: Rows) -> Iterator[StoredSample]:
        """Yield the samples of ascending rows, each checked against its row."""
        edges = np.searchsorted(rows, self._first_rows)
        for source, first, (begin, end) in zip(
            self.sources, self._first_rows, pairwise(edges), strict=False
        ):
            yield from stored_samples(source, TRAIN, rows[begin:end] - first)

    @cached_property
    def _first_rows(self) -> npt.NDArray[np.int64]:
        # The first row of each folder, and the number of all rows.
        return np.cumsum([0, *(source.manifest.split(TRAIN).samples for source in self.sources)])

    @cached_property
    def _bases(self) -> npt.NDArray[np.int64]:
        # The number of each folder's first shard, and of all shards.
        counts = [len(source.manifest.split(TRAIN).shards) for source in self.sources]
        return np.cumsum([0, *counts])


def conversion_of(manifest: Manifest) -> Resize:
    """Return what the conversion of a data set changed in its images."""
    try:
        conversion: Resize = shaped(manifest.preset, Resize, "preset")
    except Misshapen as error:
        raise DataError(f"data set {manifest.dataset}: its manifest: {error}") from None
    return conversion


def opened(config: DataSettings, location: str = "") -> Source:
    """Return the data set at a location, by default that of the settings, read by its cache."""
    return open_source(location or config.data, config.cache)


def training_pool(config: DataSettings) -> SamplePool:
    """Return the training samples of the settings; DataError if the classes differ."""
    further = weights_in("--extra-data", config.extra_data)
    sources = tuple(opened(config, location) for location in (config.data, *further))
    for source in sources[1:]:
        if source.manifest.classes != sources[0].manifest.classes:
            raise DataError(
                f"{source.location} has other classes than {sources[0].location}:"
                " only folders with the same classes can be mixed"
            )
    return SamplePool(sources)


def share_index(source: Source, split: str, ranks: Ranks) -> None:
    """Have the ranks of a node use one copy of an index: the one that the first of them reads.

    A rank that is alone on its node takes part in the exchange: other nodes may have several.
    """
    if not ranks.connected:
        return
    # ImageNet's index has 61 MB: eight ranks and their workers would hold, and read, it as often.
    lends = ranks.local_rank == 0 and ranks.local_world > 1
    loan = source.lend_index(split) if lends else (0, 0, 0, 0)
    process, number, device, inode = map(
        int, ranks.all_gather(np.array(loan, np.int64))[ranks.rank - ranks.local_rank]
    )
    if ranks.local_world > 1:  # if it cannot be borrowed, it is read when needed
        source.borrow_index(split, (process, number, device, inode))


def training_mixture(config: DataSettings, pool: SamplePool) -> Mixture:
    """Return how often each sample of the pool is drawn, by the settings."""
    classes, labels = pool.classes, pool.index["label"]
    by_folder = [1.0, *weights_in("--extra-data", config.extra_data).values()]
    only = [class_number(name, classes) for name in filter(None, config.only_classes.split(","))]
    if len(by_folder) == 1 and not config.class_weights:
        chosen = frozenset(only) if only else None
        return mixture(labels, {}, chosen, config.max_train_samples, config.seed)
    groups = pool.folder_of_row * len(classes) + labels
    by_class = _class_weights(config, pool, by_folder, only)
    weights = {
        folder * len(classes) + label: weight * by_class[label]
        for folder, weight in enumerate(by_folder)
        for label in range(len(classes))
    }
    kept = frozenset(group for group in weights if not only or group % len(classes) in only)
    return mixture(groups, weights, kept, config.max_train_samples, config.seed)


def _class_weights(
    config: DataSettings, pool: SamplePool, by_folder: list[float], only: list[int]
) -> npt.NDArray[np.float64]:
    weights = np.ones(len(pool.classes))
    for name, weight in class_weights_in("--class-weights", config.class_weights).items():
        weights[class_number(name, pool.classes)] = weight
    if config.class_weights != BALANCED:
        return weights
    labels = pool.index["label"]
    kept = np.flatnonzero(np.isin(labels, only)) if only else np.arange(labels.size)
    kept = kept[: config.max_train_samples or None]
    shares = np.array(by_folder)[pool.folder_of_row[kept]]
    return balanced(np.bincount(labels[kept], shares, len(weights)).astype(np.float64))
