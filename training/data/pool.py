"""The samples of a split: one index over one shard folder or several of them."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rackrun.data_location import parts_of
from rackrun.errors import DataError
from rackrun.shards.index import Manifest
from rackrun.shards.open import open_source
from rackrun.shards.source import Source
from rackrun.training.data.samples import StoredSample, stored_samples
from rackrun.training.settings.data import DataSettings

TRAIN = "train"


@dataclass(frozen=True)
class SamplePool:
    """A split of shard folders with the same classes, as if they were one."""

    sources: tuple[Source, ...]
    """Those that have samples in the split."""
    split: str = TRAIN

    def __reduce__(self) -> tuple[type["SamplePool"], tuple[tuple[Source, ...], str]]:
        return SamplePool, (self.sources, self.split)  # without the joined index

    @property
    def size(self) -> int:
        """Samples of all folders."""
        return int(self._first_rows[-1])

    @property
    def index(self) -> npt.NDArray[np.void]:
        """The rows of all folders; shard numbers run on from folder to folder."""
        # The index of one folder stays where loader workers map it: no copy is kept here.
        return self.sources[0].index(self.split) if len(self.sources) == 1 else self._joined

    @cached_property
    def _joined(self) -> npt.NDArray[np.void]:
        parts, first = [], 0
        for source in self.sources:
            part = source.index(self.split).copy()
            part["shard"] += np.uint32(first)
            first += len(source.manifest.split(self.split).shards)
            parts.append(part)
        return np.concatenate(parts)

    def samples(self, rows: npt.NDArray[np.integer]) -> Iterator[StoredSample]:
        """Yield the samples of these rows, each checked against its row."""
        folders = np.searchsorted(self._first_rows, rows, side="right") - 1
        for part in np.split(np.arange(rows.size), np.flatnonzero(np.diff(folders)) + 1):
            if part.size:
                folder = folders[part[0]]
                within = rows[part] - self._first_rows[folder]
                yield from stored_samples(self.sources[folder], self.split, within)

    @cached_property
    def _first_rows(self) -> npt.NDArray[np.int64]:
        # The first row of each folder, and the number of all rows.
        sizes = (source.manifest.split(self.split).samples for source in self.sources)
        return np.cumsum([0, *sizes])


def sources_of(config: DataSettings) -> tuple[Source, ...]:
    """Return the data sets of the settings, read by their cache; DataError if they do not fit."""
    sources = tuple(open_source(location, config.cache) for location in parts_of(config.data))
    for number, source in enumerate(sources):
        for earlier in sources[:number]:
            if why := why_not_joined(earlier.manifest, source.manifest):
                raise DataError(f"{source.location}: {why} {earlier.location}; leave one out")
    return sources


def why_not_joined(one: Manifest, other: Manifest) -> str:
    """Return why two data sets cannot be read as one, before the name of the first; or nothing."""
    if one.lineage == other.lineage:
        return "the same data set, or another version of it, as"
    if one.classes != other.classes:
        return "other classes than in"
    if (one.preset, one.upright) != (other.preset, other.upright):
        return "converted with other options than"
    return ""


def digest_of(config: DataSettings, sources: tuple[Source, ...]) -> str:
    """Return the identity of the training data: the folders, and the choice from them."""
    folders = [source.manifest.digest for source in sources]
    if len(folders) == 1 and not config.chooses:
        return folders[0]
    chosen = [config.only_classes, config.class_weights, config.max_train_samples]
    return hashlib.sha256(json.dumps([folders, *chosen]).encode()).hexdigest()
