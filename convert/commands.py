"""The commands of `rackrun convert`; a class of settings is imported only when it is called."""

import shlex
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

from rackrun.commandline.help_page import Head, show
from rackrun.commandline.options import HELP
from rackrun.commandline.parser import parse, unknown_command
from rackrun.commands import called
from rackrun.errors import UsageError


class Runnable(Protocol):
    """The settings of a command."""

    def run(self) -> None:
        """Run the command."""


class Subcommand(NamedTuple):
    """A command: its group and line in the help, its module here, the class of its settings."""

    group: str
    help: str
    module: str
    settings: str


RAW, SHARDS = "From raw data to shards", "Folders of shards"
VERSIONS = "Versions of a folder of shards"
FOLDER = ("folder", "FolderOfClasses")
EDIT = "versions.edit"

COMMANDS = {
    "catdog": Subcommand(RAW, "Kaggle's or Microsoft's cats and dogs.", "catdog", "Catdog"),
    "imagenet": Subcommand(
        RAW, "ImageNet-1k, in any of its usual layouts.", "imagenet", "Imagenet"
    ),
    "mnist": Subcommand(RAW, "MNIST, from its four files.", "mnist", "MnistFiles"),
    "folder": Subcommand(RAW, "Folders of images, one per class.", *FOLDER),
    "imagefolder": Subcommand(RAW, "The same as folder, by torchvision's name.", *FOLDER),
    "csv": Subcommand(RAW, "A CSV or Parquet file of paths and labels.", "table", "ImageTable"),
    "hf": Subcommand(RAW, "A Hugging Face data set on this machine.", "hf", "HuggingFace"),
    "index": Subcommand(RAW, "Write an index for WebDataset tars.", "indexing.command", "Index"),
    "append": Subcommand(VERSIONS, "Add images.", "versions.append", "Append"),
    "drop": Subcommand(VERSIONS, "Drop samples.", EDIT, "Drop"),
    "relabel": Subcommand(VERSIONS, "Change the class of samples.", EDIT, "Relabel"),
    "shards": Subcommand(VERSIONS, "Write a version as a new, plain folder.", "shards", "Shards"),
    "summary": Subcommand(SHARDS, "Print counts, bytes and classes.", "summary", "Summary"),
    "verify": Subcommand(SHARDS, "Read everything and check every byte.", "verify", "Verify"),
}
"""A line here adds a command; its module is imported only when it is called."""

HEAD = Head(
    "{prog} COMMAND [options]",
    "Convert raw data sets to folders of shards; summarize and verify them.",
    (
        ("{prog} folder photos data/shards", "convert one folder of images per class"),
        ("{prog} folder --help", "show the options of a command"),
        ("{prog} verify data/shards", "check the result"),
    ),
)


def read(args: Sequence[str]) -> Runnable:
    """Return the settings of the command that the arguments name; UsageError for bad ones.

    --help prints and exits.
    """
    prog, names = called("convert"), ", ".join(COMMANDS)
    name = args[0] if args else ""
    if name in HELP:
        groups: dict[str, list[tuple[str, str]]] = {}
        for each, command in COMMANDS.items():
            groups.setdefault(command.group, []).append((each, command.help))
        show(HEAD.of(prog=prog), groups)
    if not name:
        raise UsageError(f"no command given; there are: {names}; type: {prog} --help")
    if name not in COMMANDS:
        if Path(name).exists():
            kind = "csv" if name.endswith((".csv", ".parquet")) else "folder"
            typed = shlex.join([kind, *args])
            raise UsageError(f"{name}: not a command; did you mean: {prog} {typed}")
        raise UsageError(unknown_command(name, COMMANDS, prog))
    module = import_module(f"rackrun.convert.{COMMANDS[name].module}")
    settings: type[Runnable] = getattr(module, COMMANDS[name].settings)
    return parse(settings, f"{prog} {name}", args[1:])
