"""The options that all data sets share."""

from dataclasses import dataclass, field
from typing import Literal

from rackrun.errors import UsageError
from rackrun.machine import core_count
from rackrun.shards.resize import Resize


@dataclass(frozen=True)
class Packing:
    """Shards, splits and damaged images."""

    preset: Resize = field(default_factory=Resize)
    shards: int = 0
    """Number of training shards; 0: about 64 MiB each (as in other splits), and at least 16 if
    there are enough images."""
    val_percent: float = 10.0
    """Percent of each class to hold out, unless there is a validation split; 0: none."""
    test_percent: float = 0.0
    """Percent of each class to set aside as the split test."""
    exif: Literal["apply", "ignore"] = "apply"
    """apply: turn images upright by their EXIF or XMP (never ImageNet or cats and dogs)."""
    allow_left_out: int | None = None
    """Number of damaged images that may be left out; default: 1 %, of a small set 10 %."""
    allow: tuple[Literal["leaks", "similar-classes", "split-names", "unique-labels"], ...] = ()
    """leaks: copies of an image in several splits. similar-classes: class names that differ only by
    case, blanks, Unicode form or leading zeros. split-names: classes called train, val, test or
    the like. unique-labels: most classes have one image. Repeatable."""
    workers: int = 0
    """Number of processes; 0: one per core."""
    task_index: int | None = None
    """In an array job: number of this task, from 0; the last to end completes the folder."""
    task_count: int = 1
    """Number of tasks in the array job; each converts an equal part."""
    force: bool = False
    """Replace the output of an earlier conversion in OUT."""

    def __post_init__(self) -> None:
        if min(self.shards, self.workers, self.allow_left_out or 0) < 0:
            raise UsageError("--shards, --workers and --allow-left-out cannot be negative")
        if not 0 <= self.val_percent <= 90:
            raise UsageError(f"--val-percent {self.val_percent}: 0 to 90 is possible")
        if not 0 <= self.test_percent <= 90 - self.val_percent:
            raise UsageError(
                f"--test-percent {self.test_percent}: 0 to 90 is possible, with --val-percent"
            )
        if self.task_count < 1 or (self.task_index is None and self.task_count > 1):
            raise UsageError("--task-count needs --task-index, from 0 to one less than the count")
        if self.task_index is not None and not 0 <= self.task_index < self.task_count:
            raise UsageError(
                f"--task-index {self.task_index}: with --task-count {self.task_count} it is "
                f"0 to {self.task_count - 1}"
            )
        if self.task_index is not None and self.force:
            raise UsageError("--force in an array job would remove what other tasks have written")

    @property
    def processes(self) -> int:
        """Return the number of processes that convert."""
        return self.workers or core_count()
