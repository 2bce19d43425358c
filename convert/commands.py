"""The commands of `python -m convert`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, subcommand

from convert.catdog import Catdog
from convert.folder import FolderOfClasses, ImageFolder
from convert.hf import HuggingFace
from convert.imagenet import Imagenet
from convert.indexing.command import Index
from convert.mnist import MnistFiles
from convert.packing.output_folder import Target
from convert.packing.pack import finish
from convert.packing.sidecars import write_sidecars
from convert.summary import Summary
from convert.table import ImageTable
from convert.verify import Verify
from rackrun.errors import UsageError
from rackrun.machine import core_count


@dataclass(frozen=True)
class Finish:
    """Complete a folder that the tasks of an array job have filled."""

    out: Positional[Path]
    """Folder with the shards."""
    allow_left_out: int | None = None
    """Damaged images that may be left out; default: 1 %, or 10 % of a small set."""

    def run(self) -> None:
        """Write indexes, report and manifest; refuse while a share is missing."""
        finish(self.out, self.allow_left_out)


@dataclass(frozen=True)
class Sidecars:
    """Write files for other readers: DALI's .idx, wids' JSON, Energon's .nv-meta."""

    folder: Positional[Path]
    """Finished shard folder."""
    workers: int = 0
    """Processes; 0: one per core."""

    def run(self) -> None:
        """Write them from the headers of the tars; the shards stay as they are."""
        if self.workers < 0:
            raise UsageError("--workers cannot be negative")
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder}: there is no such folder")
        with Target(self.folder).locked():
            write_sidecars(self.folder, self.workers or core_count())


@dataclass(frozen=True)
class Convert:
    """Convert raw data sets into folders of shards; summarise and verify them."""

    command: (
        Annotated[Catdog, subcommand("catdog")]
        | Annotated[Imagenet, subcommand("imagenet")]
        | Annotated[MnistFiles, subcommand("mnist")]
        | Annotated[FolderOfClasses, subcommand("folder")]
        | Annotated[ImageFolder, subcommand("imagefolder")]
        | Annotated[ImageTable, subcommand("csv")]
        | Annotated[HuggingFace, subcommand("hf")]
        | Annotated[Index, subcommand("index")]
        | Annotated[Finish, subcommand("finish")]
        | Annotated[Sidecars, subcommand("sidecars")]
        | Annotated[Summary, subcommand("summary")]
        | Annotated[Verify, subcommand("verify")]
    )
