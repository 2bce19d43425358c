"""Choose the rows of the index that make an epoch: a subset, the first N, a weighted mixture.

A weight is how often a sample comes per epoch: 1 once, 2 twice, 0.5 in every other epoch, 0 never.
The share of a group in an epoch is rounded once to whole samples; its draws then walk through the
group in a fixed order, from where the last epoch ended. So after any number of epochs no sample of
a group has come more than once more often than another, and all epochs are equally long.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rackrun.errors import UsageError
from rackrun.training.data.order import Rows
from rackrun.units import whole_number

BALANCED = "balanced"
"""Weights that follow from the number of each class's samples."""


@dataclass(frozen=True)
class RowGroup:
    """Rows that share a weight, in the order in which epochs draw them."""

    rows: Rows
    draws: int  # per epoch

    def copies(self, epoch: int) -> list[Rows]:
        """Return the rows that this epoch draws: first copies, second copies, …; all ascending."""
        start = epoch * self.draws
        walked = (start + np.arange(self.draws)) % self.rows.size
        rounds = [walked[at : at + self.rows.size] for at in range(0, self.draws, self.rows.size)]
        return [np.sort(self.rows[indices]) for indices in rounds]


@dataclass(frozen=True)
class Mixture:
    """The draws of every epoch from the index."""

    groups: tuple[RowGroup, ...] = ()
    first: range = range(0)
    """The first rows of the index, each once. They take no memory, so groups are for the others."""

    @property
    def samples(self) -> int:
        """Samples per epoch, copies counted."""
        return len(self.first) + sum(group.draws for group in self.groups)

    def rows(self, epoch: int) -> Rows:
        """Return the rows of an epoch: ascending, once more from the start for each copy."""
        if self.first:
            return np.arange(len(self.first), dtype=np.int32)
        layers: dict[int, list[Rows]] = {}
        for group in self.groups:
            for layer, rows in enumerate(group.copies(epoch)):
                layers.setdefault(layer, []).append(rows)
        return np.concatenate([np.sort(np.concatenate(layers[layer])) for layer in sorted(layers)])


def mixture(
    groups: npt.NDArray[np.integer],
    weights: Mapping[int, float],
    only: frozenset[int] | None = None,
    first: int = 0,
    seed: int = 0,
) -> Mixture:
    """Return the mixture of samples by their group number (the label, or the source).

    Groups without a weight have 1; `only` keeps these groups, `first` that many samples of the
    rest (0: all).
    """
    if only is None and not weights:
        return _with_samples(Mixture(first=range(groups.size)[: first or None]))
    everything = np.arange(groups.size, dtype=np.int32)
    kept = everything if only is None else everything[np.isin(groups, list(only))]
    kept = kept[: first or None]
    groups_present = {} if not weights else {int(group) for group in np.unique(groups[kept])}
    special = sorted(group for group in groups_present if weights.get(group, 1.0) != 1.0)
    plain = kept[~np.isin(groups[kept], special)] if special else kept
    parts = [RowGroup(plain, plain.size)] if plain.size else []
    for group in special:
        rows = kept[groups[kept] == group]
        words = np.random.PCG64(np.random.SeedSequence((seed, group))).random_raw(rows.size)
        in_random_order = rows[np.argsort(words, kind="stable")]
        parts.append(RowGroup(in_random_order, round(rows.size * weights[group])))
    return _with_samples(Mixture(tuple(part for part in parts if part.draws)))


def balanced(sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the weights of classes of these sizes that draw all equally often.

    An epoch stays as long as it is. Classes without samples share nothing.
    """
    drawn = sizes.sum() / max(np.count_nonzero(sizes), 1)
    weights = np.zeros(sizes.size)
    np.divide(drawn, sizes, out=weights, where=sizes > 0)
    return weights


def _with_samples(chosen: Mixture) -> Mixture:
    if not chosen.samples:
        raise UsageError("no samples are left to train on: loosen the filters or the weights")
    return chosen


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


def class_number(name: str, classes: tuple[str, ...]) -> int:
    """Return the number of a class that is given by name or by number."""
    if name in classes:
        return classes.index(name)
    number = whole_number(name, len(classes) - 1)
    if number is not None:
        return number
    few = ", ".join(classes[:8]) + (", …" if len(classes) > 8 else "")
    raise UsageError(
        f"no class {name[:80]!r}: there are {few}, or numbers from 0 to {len(classes) - 1}"
    )
