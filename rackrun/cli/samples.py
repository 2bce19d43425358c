"""`rackrun samples RUN`: the samples that a run could see, by the version that it is pinned to.

This file knows both what a run has chosen (`training`) and where keys stand (`convert`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from rackrun.commandline.options import Examples, Positional, Values
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.convert.packing.stored_samples import shards_of
from rackrun.errors import DataError, UsageError
from rackrun.run_folder import RunFolder
from rackrun.runs import run_folder, unknown_run
from rackrun.shapes import Excerpt, Misshapen, Whole, parsed_file
from rackrun.shards.open import open_source
from rackrun.shards.source import Source
from rackrun.tables import as_cell, require_folder, require_replaceable, table, write_table
from rackrun.terminal import clean
from rackrun.training.data.choice import chosen
from rackrun.training.settings.data import DataSettings

COLUMNS = ("data", "split", "shard", "key", "class")
TRAIN = "train"
MOST_BYTES = 1 << 20  # of config.json


@dataclass(frozen=True)
class Samples:
    """List the samples that a run trains and evaluates on.

    They are those of the version of its data, whatever was dropped, relabeled or added since.
    """

    examples: ClassVar[Examples] = (
        ("{prog} runs/latest", "how many there are"),
        ("{prog} runs/latest --csv samples.csv", "a row for each sample"),
    )

    run: Positional[str]
    """The run: its folder, name, or id."""
    csv: Annotated[str, Values("FILE")] = ""
    """Write shard, key and class of every sample to this file."""


class Recorded(Excerpt, frozen=True):
    """What config.json has on the data of a run."""

    data_versions: dict[str, str]
    eval_split: str
    only_classes: str
    class_weights: str
    max_train_samples: Whole
    seed: Whole

    def sources(self) -> list[Source]:
        """Return the versions that the run reads; DataError where another one is there now."""
        sources = [open_source(location) for location in self.data_versions]
        for source, digest in zip(sources, self.data_versions.values(), strict=True):
            if source.manifest.digest != digest:
                raise DataError(f"{source.location}: not the data set of the run any more")
        return sources


def main(args: Sequence[str]) -> int:
    """Print how many samples there are, and write the table that was asked for."""
    given = parse(Samples, called("samples"), args)
    require_folder(given.csv)
    require_replaceable(given.csv, COLUMNS)
    parts = _parts(_recorded(given.run))
    counts = [
        (clean(source.location), split, f"{is_seen.sum():,}")
        for (source, split), is_seen in parts.items()
    ]
    sys.stdout.write(table(("data", "split", "samples"), counts, numbers=["samples"]))
    if given.csv:
        write_table(Path(given.csv), [COLUMNS, *_rows(parts)])
    return 0


def _recorded(run: str) -> Recorded:
    path = run_folder(run)
    if not path.is_dir():
        raise unknown_run(run)
    config = RunFolder(path).config
    try:
        recorded = parsed_file(config, Recorded, MOST_BYTES)
    except FileNotFoundError:
        raise UsageError(f"{path}: no {config.name}, which only runs of tasks have") from None
    except Misshapen as error:
        raise UsageError(f"{config}: not the settings of a run: {error}") from None
    if not recorded.data_versions:
        raise UsageError(f"{path}: trained without an index, on noise or plain tars")
    return recorded


Parts = dict[tuple[Source, str], np.ndarray]
"""Source and split -> for each row of its index, whether the run could see it."""


def _parts(recorded: Recorded) -> Parts:
    sources = recorded.sources()
    settings = DataSettings(
        only_classes=recorded.only_classes,
        class_weights=recorded.class_weights,
        max_train_samples=recorded.max_train_samples,
        seed=recorded.seed,
    )
    labels = [source.index(TRAIN)["label"] for source in sources]
    rows = chosen(settings, np.concatenate(labels), sources[0].manifest.classes)
    is_chosen = np.zeros(sum(map(len, labels)), bool)
    is_chosen[np.concatenate([rows.once, *(each.rows for each in rows.weighted)])] = True
    by_source = np.split(is_chosen, np.cumsum([*map(len, labels)])[:-1])
    parts = {(source, TRAIN): part for source, part in zip(sources, by_source, strict=True)}
    for source in sources:
        if any(split.name == recorded.eval_split for split in source.manifest.splits):
            number = len(source.index(recorded.eval_split))
            parts[source, recorded.eval_split] = np.ones(number, bool)
    return parts


def _rows(parts: Parts) -> Iterator[tuple[str, ...]]:
    for (source, split), is_seen in parts.items():
        classes, first = source.manifest.classes, 0
        for shard in shards_of(source):
            if shard.split != split:
                continue
            flags = is_seen[first : (first := first + len(shard.rows))]
            for key, row, flag in zip(shard.sample_keys(), shard.rows, flags, strict=True):
                if flag:
                    names = source.location, split, shard.shard.name, key, classes[row["label"]]
                    yield tuple(map(as_cell, names))
