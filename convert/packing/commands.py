"""The commands on folders that were packed before: `finish` and `sidecars`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from convert.packing.output_folder import Target
from convert.packing.pack import finish
from convert.packing.sidecars import write_sidecars
from rackrun.commandline.options import Examples, Positional
from rackrun.errors import UsageError
from rackrun.machine import core_count


@dataclass(frozen=True)
class Finish:
    """Complete the folder of shards that the tasks of an array job have written."""

    examples: ClassVar[Examples] = (("{prog} data/shards", "after all tasks of an array job"),)

    out: Positional[Path]
    """Folder with the shards."""
    allow_left_out: int | None = None
    """Damaged images that may be left out; default: 1 %, or 10 % of a small set."""
    allow: tuple[Literal["leaks"], ...] = ()
    """leaks: copies of an image in several splits."""

    def run(self) -> None:
        """Write indexes, report and manifest; refuse while a share is missing."""
        if (self.allow_left_out or 0) < 0:
            raise UsageError("--allow-left-out cannot be negative")
        finish(self.out, self.allow_left_out, self.allow)


@dataclass(frozen=True)
class Sidecars:
    """Write index files for other programs: DALI's .idx, wids' JSON, Energon's .nv-meta."""

    examples: ClassVar[Examples] = (("{prog} data/shards", "for DALI, wids and Energon"),)

    folder: Positional[Path]
    """Finished shard folder."""
    workers: int = 0
    """Number of processes; 0: one per core."""

    def run(self) -> None:
        """Write them from the headers of the tars; the shards stay as they are."""
        if self.workers < 0:
            raise UsageError("--workers cannot be negative")
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder}: there is no such folder")
        with Target(self.folder).locked():
            write_sidecars(self.folder, self.workers or core_count())
