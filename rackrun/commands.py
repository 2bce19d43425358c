"""The commands of `rackrun`, and how the user calls them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from rackrun.errors import UsageError


class Command(NamedTuple):
    """A command: its group and line in the help, and the function that runs it."""

    group: str
    help: str
    target: str
    """Module with a `main(args)` that returns an exit code; another function as MODULE:FUNCTION."""
    words: tuple[str, ...] = ()
    """Words to insert before those of the user."""

    def load(self) -> Callable[[list[str]], int | None]:
        """Import the function that runs the command."""
        module, _, function = self.target.partition(":")
        loaded: Callable[[list[str]], int | None]
        loaded = getattr(import_module(module), function or "main")
        return loaded


_SSH = "launcher.commands.ssh"
_REPORT = "rackrun.run_report.__main__"

COMPLETION = "completion"

COMMANDS = {
    "local": Command("Train", "Train on this machine.", "launcher.commands.local"),
    "ssh": Command("Train", "Train on the hosts of a file, over SSH.", _SSH),
    "ray": Command("Train", "Train on the nodes of a Ray cluster.", "launcher.commands.ray"),
    "node": Command("Train", "Train on this node of a scheduler's job.", "launcher.commands.node"),
    "check": Command("Train", "Check hosts and start nothing.", _SSH, ("--check",)),
    "ps": Command("Runs", "List the runs known here and on hosts.", "launcher.catalog.ps"),
    "rerun": Command("Runs", "Start a run again, as a new one.", "launcher.catalog.rerun"),
    "board": Command("Runs", "Show a run in a browser on this machine.", "launcher.commands.board"),
    "report": Command("Runs", "Draw report.html of a run; compare runs.", _REPORT),
    "attach": Command("Runs", "Follow a detached run; Ctrl-C detaches.", _SSH, ("attach",)),
    "logs": Command("Runs", "Print the output of a detached run's ranks.", _SSH, ("logs",)),
    "status": Command("Runs", "Show the processes of a run on every host.", _SSH, ("status",)),
    "stop": Command("Runs", "Stop a run as Ctrl-C would; verify every host.", _SSH, ("stop",)),
    "evaluate": Command("Models", "Evaluate a model on a split.", "training.judge.command"),
    "predict": Command("Models", "Classify images with a model.", "training.predict"),
    "export": Command("Models", "Export a model to other formats.", "training.export.command"),
    "convert": Command("Data", "Convert images to tar shards; verify them.", "convert.__main__"),
    "serve": Command("Data", "Serve a folder of shards over HTTP.", "nginx.__main__"),
    COMPLETION: Command("Shell", "Print completion for bash or zsh.", "rackrun.completion"),
}
"""A line here adds a command; its module is imported only when it is called."""

VERSION = "--version"
ALIASES = {"help": "--help", "version": VERSION, "list": "ps"}
"""Names that other programs use for these."""

_SPELLINGS = {
    "launcher.commands.local": "./run-local",
    "launcher.commands.ssh": "./run-ssh",
    "launcher.commands.ray": "./run-ray",
    "launcher.catalog.ps": "./run-ssh ps",
    "launcher.catalog.rerun": "./run-local rerun",
    "launcher.commands.node": "python -m launcher node",
    "convert.__main__": "python -m convert",
    "nginx.__main__": "python -m nginx",
    _REPORT: "python -m rackrun report",
    "training.export.command": "python -m training export",
    "training.judge.command": "python -m training evaluate",
    "training.predict": "python -m training predict",
}
"""How to call commands without `rackrun` installed: a script of the repository, or a module."""

_EXAMPLES = """\
  rackrun local                                              a demo that needs no data
  rackrun convert folder ~/images data/shards                one folder of images per class
  rackrun local catdog --data data/shards --epochs 30        train on this machine
  rackrun check hosts.txt                                    check every host
  rackrun ssh hosts.txt catdog --data data/shards            train on all hosts
  rackrun ssh --detach hosts.txt -- python train.py          any script, under torchrun
"""


class _Caller:
    """How messages call commands in this process; in a checkout by scripts, unless changed."""

    by_name = not (Path(__file__).parents[1] / "run-ssh").exists()
    folder = "./"


def called(name: str) -> str:
    """Return a command as the user would call it here: `rackrun stop`, or `./run-ssh stop`."""
    command = COMMANDS[name]
    spelling = _SPELLINGS.get(command.target)
    if _Caller.by_name or spelling is None:
        return f"rackrun {name}"
    return " ".join((spelling.replace("./", _Caller.folder, 1), *command.words))


def program() -> list[str]:
    """Return the words that start `rackrun` in any folder, just its name if that is enough."""
    if _Caller.by_name and shutil.which("rackrun"):
        return ["rackrun"]
    return [sys.executable, "-P", "-S", str(Path(__file__).with_name("__main__.py"))]


def run(args: Sequence[str]) -> int:
    """Run the command that the first word names: `ssh`, or a script's path, as `./run-ssh`."""
    if not args:
        sys.stderr.write(help_text())
        return UsageError.exit_code
    if args[0] in ("-h", "--help", "help"):
        sys.stdout.write(help_text())
        return 0
    folder, script, name = args[0].rpartition("run-")
    name, rest = ALIASES.get(name, name), list(args[1:])
    _Caller.by_name, _Caller.folder = not script, folder
    if VERSION in (name, *map(_meant, rest[:1])):
        from rackrun.commandline import print_version

        return print_version()
    if name not in COMMANDS:
        raise UsageError(_unknown(args[0]))
    command = COMMANDS[name]
    if command.group == "Train":
        rest[:1] = map(_meant, rest[:1])
        if rest and (is_about_runs(rest[0]) or rest[0] == COMPLETION):  # ./run-ssh stop RUN
            command = COMMANDS[rest.pop(0)]
    return command.load()([*command.words, *rest]) or 0


def _meant(word: str) -> str:
    """Return the first word after a command by its own name, unless it is that of a file here."""
    return word if Path(word).exists() else ALIASES.get(word, word)


def is_about_runs(word: str) -> bool:
    """Return True for a command that manages runs, which is also accepted after another."""
    return word in COMMANDS and COMMANDS[word].group == "Runs"


def help_text() -> str:
    """Return the help of `rackrun`: examples first, then the commands by group."""
    lines = ["usage: rackrun COMMAND [words]\n\nExamples:\n", _EXAMPLES]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        members = [(name, one.help) for name, one in COMMANDS.items() if one.group == group]
        lines += [f"\n{group}:\n", *(f"  {name:11} {text}\n" for name, text in members)]
    return "".join([*lines, "\nrackrun COMMAND --help shows the options of a command.\n"])


def _unknown(word: str) -> str:
    """Return the message for an unknown command."""
    from rackrun.commandline import unknown_command
    from rackrun.user_code.tasks import find_task

    if find_task(word):
        return f"{word} is a task; type: rackrun local {word}, or rackrun ssh HOSTS {word}"
    return unknown_command(word, COMMANDS, "rackrun")
