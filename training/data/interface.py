"""What the training loop sees of a data set: batches of every step, a split to evaluate, facts."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from rackrun.shards.cache_filler import CacheFiller
from rackrun.shards.resize import Resize
from rackrun.training.data.order import Cut
from rackrun.training.data.samples import Batch
from rackrun.training.ranks import Numbers, Ranks


class Data(ABC):
    """A data set and a way to walk through it."""

    classes: tuple[str, ...]
    dataset: str
    """Name of the data set."""
    digest: str
    """The identity of the data set, whatever its name."""
    epoch_steps: int
    """Steps that make an epoch."""
    batch: int
    """Samples of a full step, over all ranks: what its gradient is divided by."""
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
    lead: int = 0
    """Steps after the current one of which something may be read: they stay cut as they were."""

    def __init__(self, ranks: Ranks) -> None:
        self._cuts = [Cut.even(ranks.world)]  # the newest one last
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

    def samples_in(self, step: int) -> int:
        """Return the samples of this step over all ranks: fewer where an epoch ends exactly."""
        return self.batch

    def cut(self, step: int) -> Cut:
        """Return how this step is cut among the ranks."""
        return next(cut for cut in reversed(self._cuts) if cut.step <= step)

    def recut(self, cut: Cut) -> None:
        """Cut the steps from one on otherwise, which no loader worker has begun (see `lead`)."""
        self._cuts.append(cut)
