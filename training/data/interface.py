"""What the training loop sees of a data set: batches of every step, a split to evaluate, facts."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from rackrun.shards.cache_filler import CacheFiller
from rackrun.shards.resize import Resize
from rackrun.training.data.order import Steps
from rackrun.training.data.ring import Batch
from rackrun.training.ranks import Numbers


class Data(ABC):
    """A data set and a way to walk through it."""

    classes: tuple[str, ...]
    dataset: str
    """Name of the data set."""
    digest: str
    """The identity of the data set, whatever its name."""
    steps: Steps
    """The steps of the run, and how each is cut among the ranks."""
    rows: int
    """Rows of the training set's index; without an index, the images that make an epoch."""
    tars: int = 0
    """Tars without an index that are read; 0: the index says which samples there are."""
    has_evaluation: bool
    """True if there are validation samples."""
    conversion: Resize = Resize()
    """What the conversion changed in the images."""
    upright: bool = True
    """Whether it turned them upright by their EXIF."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        """The digest of each folder that is read, by its location."""
        self.cache = CacheFiller((), ())
        """What fetches the data into the cache of this host."""

    @abstractmethod
    def training(self, start: int) -> Iterator[Batch]:
        """Yield this rank's batches of every step from this one on, without end."""

    @abstractmethod
    def evaluation(self) -> Iterator[Batch]:
        """Yield this rank's part of the validation samples: all ranks together have each once."""

    def grid(self, count: int, rows: Sequence[int] = ()) -> Batch | None:
        """Return validation images to look at: those of these rows, or some at even distances.

        None where no index says where an image is.
        """
        return None

    def class_sizes(self) -> Numbers:
        """Return the samples of each class in an epoch of training; 1 each if unknown."""
        return np.ones(len(self.classes), np.int64)

    def evaluated_sizes(self) -> Numbers:
        """Return the evaluated samples of each class."""
        return np.zeros(len(self.classes), np.int64)
