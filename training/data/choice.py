"""Choose the rows of the index that make an epoch: some classes, the first samples, weights.

A weight is how often a sample of a class comes per epoch: 1 once, 2 twice, 0.5 in every other
epoch, 0 never. The samples of a class in an epoch are rounded once to a whole number; they then
walk through the class in a fixed order, from where the last epoch ended. So after any number of
epochs no sample of a class has come more than once more often than another, and all epochs are
equally long.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from rackrun.errors import UsageError
from rackrun.training.data.order import EpochRows, Rows, WeightedRows
from rackrun.training.settings.data import DataSettings
from rackrun.units import whole_number

BALANCED = "balanced"
"""Weights that follow from the number of each class's samples."""


def chosen(
    config: DataSettings, labels: npt.NDArray[np.integer], classes: tuple[str, ...]
) -> EpochRows:
    """Return the rows that the settings choose; UsageError where none are left."""
    rows = np.arange(labels.size, dtype=np.int32)
    if only := list(filter(None, config.only_classes.split(","))):
        numbers = [class_number("--only-classes", name, classes) for name in only]
        rows = rows[np.isin(labels, numbers)]
    rows = rows[: config.max_train_samples or None]
    choice = (
        _weighted(rows, labels[rows], classes, config) if config.class_weights else EpochRows(rows)
    )
    if not choice.samples:
        raise UsageError("no samples are left to train on: loosen the filters or the weights")
    return choice


def _weighted(
    rows: Rows, labels: npt.NDArray[np.integer], classes: tuple[str, ...], config: DataSettings
) -> EpochRows:
    sizes = np.bincount(labels, minlength=len(classes))
    if config.class_weights == BALANCED:  # all equally often, in epochs as long as before
        drawn = sizes.sum() / max(int(np.count_nonzero(sizes)), 1)
        weights = drawn / np.maximum(sizes, 1)
    else:
        weights = np.ones(len(classes))
        for name, weight in weights_in("--class-weights", config.class_weights).items():
            weights[class_number("--class-weights", name, classes)] = weight
    by_class = np.split(rows[np.argsort(labels, kind="stable")], np.cumsum(sizes)[:-1])
    weighted = []
    for label in np.flatnonzero((weights != 1) & (sizes > 0)).tolist():
        words = np.random.PCG64(np.random.SeedSequence((config.seed, label)))
        order = np.argsort(words.random_raw(int(sizes[label])), kind="stable")
        draws = round(int(sizes[label]) * float(weights[label]))
        if draws:
            weighted.append(WeightedRows(by_class[label][order], draws))
    return EpochRows(rows[weights[labels] == 1], weighted)


def class_weights_in(option: str, text: str) -> Mapping[str, float]:
    """Return the weights of single classes in an option; none where all are BALANCED."""
    return {} if text == BALANCED else weights_in(option, text)


def weights_in(option: str, text: str) -> Mapping[str, float]:
    """Return NAME=WEIGHT,… as a table; UsageError for any other text."""
    table = {}
    for part in filter(None, text.split(",")):
        name, _, weight = part.rpartition("=")
        try:
            table[name] = float(weight)
        except ValueError:
            table[name] = -1.0
        if not name or not 0 <= table[name] < 1000:
            raise UsageError(
                f"{option} {text}: {part!r} is not NAME=WEIGHT, as in {name or 'name'}=0.5"
            )
    return table


def class_number(option: str, name: str, classes: tuple[str, ...]) -> int:
    """Return the number of a class; `name` is what the option has: its name or its number.

    Raises UsageError for a number, too, where all classes are called by numbers.
    """
    if name in classes:
        return classes.index(name)
    are_numbers = all(each.isdecimal() for each in classes)
    number = None if are_numbers else whole_number(name, len(classes) - 1)
    if number is not None:
        return number
    few = ", ".join(classes[:8]) + (", …" if len(classes) > 8 else "")
    numbers = "" if are_numbers else f", or numbers from 0 to {len(classes) - 1}"
    raise UsageError(f"{option}: no class {name[:80]!r}; there are {few}{numbers}")
