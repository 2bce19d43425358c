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
from convert.packing.pack import finish
from convert.summary import Summary
from convert.table import ImageTable
from convert.verify import Verify


@dataclass(frozen=True)
class Finish:
    """Complete a folder that the tasks of an array job have filled."""

    out: Positional[Path]
    """Folder with the shards."""
    allow_left_out: int | None = None
    """Damaged images that may be left out; default: 1 %, of small sets a tenth."""

    def run(self) -> None:
        """Write indexes, report and manifest; refuse while a share is missing."""
        finish(self.out, self.allow_left_out)


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
        | Annotated[Summary, subcommand("summary")]
        | Annotated[Verify, subcommand("verify")]
    )
