"""python -m convert: raw data sets become folders of shards."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, subcommand

from convert.catdog import Catdog
from convert.folder import FolderOfClasses
from convert.imagenet import Imagenet
from convert.pack import finish
from convert.summary import Summary
from convert.verify import Verify
from shards.commandline import parse, run


@dataclass(frozen=True)
class Finish:
    """Close a folder that the tasks of an array job have filled."""

    out: Positional[Path]
    """Folder with the shards."""

    def run(self) -> None:
        """Write indexes, report and card; refused while a share is missing."""
        finish(self.out)


@dataclass(frozen=True)
class Convert:
    """Turn raw data sets into folders of shards, look into them, verify them."""

    command: (
        Annotated[Catdog, subcommand("catdog")]
        | Annotated[Imagenet, subcommand("imagenet")]
        | Annotated[FolderOfClasses, subcommand("folder")]
        | Annotated[Finish, subcommand("finish")]
        | Annotated[Summary, subcommand("summary")]
        | Annotated[Verify, subcommand("verify")]
    )


def main(args: list[str]) -> None:
    """Do what the command line says."""
    parse(Convert, "python -m convert", args).command.run()


if __name__ == "__main__":
    run(main)
