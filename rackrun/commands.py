"""The commands of `rackrun`, and how the user calls them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from rackrun.contract import variables
from rackrun.errors import UsageError


class Command(NamedTuple):
    """A command: its group and line in the help, and the function that runs it."""

    group: str
    help: str
    target: str
    """Module with a `main(args)` that returns an exit code; another function as MODULE:FUNCTION."""
    args: tuple[str, ...] = ()
    """Arguments to insert before those of the user."""

    def load(self) -> Callable[[list[str]], int | None]:
        """Import the function that runs the command."""
        module, _, function = self.target.partition(":")
        loaded: Callable[[list[str]], int | None]
        loaded = getattr(import_module(module), function or "main")
        return loaded


LAUNCHES = "Train"
"""The group of the commands that launch; behind the name of one, each command may follow."""

_SSH = "launcher.commands.ssh"
_MANAGE = "launcher.commands.detached"

COMMANDS = {
    "local": Command(LAUNCHES, "Train on this machine.", "launcher.commands.local"),
    "ssh": Command(LAUNCHES, "Train on the hosts of a file, over SSH.", _SSH),
    "ray": Command(LAUNCHES, "Train on the nodes of a Ray cluster.", "launcher.commands.ray"),
    "node": Command(LAUNCHES, "Train on this node of a scheduler's job.", "launcher.commands.node"),
    "check": Command(LAUNCHES, "Check hosts and start nothing.", _SSH, ("--check",)),
    "ps": Command("Runs", "List the runs known here and on hosts.", "launcher.catalog.ps"),
    "rerun": Command("Runs", "Start a run again, as a new one.", "launcher.commands.rerun"),
    "board": Command("Runs", "Show a run in a browser on this machine.", "launcher.commands.board"),
    "report": Command(
        "Runs", "Draw report.html of a run; compare runs.", "rackrun.run_report.__main__"
    ),
    "attach": Command("Runs", "Follow a detached run; Ctrl-C detaches.", _MANAGE, ("attach",)),
    "logs": Command("Runs", "Print the output of a detached run's ranks.", _MANAGE, ("logs",)),
    "status": Command("Runs", "Show the processes of a run on every host.", _MANAGE, ("status",)),
    "stop": Command("Runs", "Stop a run as Ctrl-C would; verify every host.", _MANAGE, ("stop",)),
    "track": Command("Runs", "Send a run to W&B or MLflow.", "training.track.command"),
    "ledger": Command(
        "Runs", "Prove that each epoch was exactly the data set.", "training.run.ledger_command"
    ),
    "evaluate": Command("Models", "Evaluate a model on a split.", "training.judge.command"),
    "predict": Command("Models", "Classify images with a model.", "training.predict"),
    "export": Command("Models", "Export a model to other formats.", "training.export.command"),
    "convert": Command("Data", "Convert images to tar shards; verify them.", "convert.__main__"),
    "serve": Command("Data", "Serve a folder of shards over HTTP.", "nginx.__main__"),
    "completion": Command("Shell", "Print completion for bash or zsh.", "rackrun.completion"),
}
"""A line here adds a command; its module is imported only when it is called."""

VERSION = "--version"
ALIASES = {"help": "--help", "version": VERSION, "list": "ps"}
"""Names that other programs use for these."""

_SCRIPTS = ("local", "ssh", "ray")
"""The commands that are scripts of the repository: `./run-local` is `rackrun local`."""

_DRAW = ("local", "ssh", "ray", "node", "attach", "rerun")
"""The commands with a dashboard, and so with --plain."""

_OF_HOSTS = ("check", "ps", "attach", "logs", "status", "stop")
"""The commands that messages call by `./run-ssh`; all others by `./run-local`."""

_EXAMPLES = """\
  rackrun local                                              a demo that needs no data
  rackrun convert folder ~/images data/shards                one folder of images per class
  rackrun local catdog --data data/shards --epochs 30        train on this machine
  rackrun check hosts.txt                                    check every host
  rackrun ssh hosts.txt catdog --data data/shards            train on all hosts
  rackrun ssh --detach hosts.txt -- python train.py          any script, under torchrun
"""


class _Caller:
    """How messages call commands: as the user did, or as the launcher that started us was."""

    typed = os.environ.get(variables.TYPED, "")
    has_scripts = (Path(__file__).parents[1] / "run-ssh").exists()
    by_name = typed.startswith("rackrun ") or not (typed or has_scripts)
    folder = typed.partition("run-")[0] if "run-" in typed.partition(" ")[0] else "./"


def called(name: str) -> str:
    """Return a command as the user would call it here: `rackrun stop`, or `./run-ssh stop`."""
    if _Caller.by_name:
        return f"rackrun {name}"
    if name in _SCRIPTS:
        return f"{_Caller.folder}run-{name}"
    script = "run-ssh" if name in _OF_HOSTS else "run-local"
    return " ".join((f"{_Caller.folder}{script}", *(COMMANDS[name].args or (name,))))


def program() -> list[str]:
    """Return the arguments that start `rackrun` in any folder, just its name if that is enough."""
    if _Caller.by_name and shutil.which("rackrun"):
        return ["rackrun"]
    return [sys.executable, "-P", "-S", str(Path(__file__).with_name("__main__.py"))]


def run(args: Sequence[str]) -> int:
    """Run the command that the first argument names: `ssh`, or a script's path, as `./run-ssh`."""
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
    if is_launch(name):
        rest[:1] = map(_meant, rest[:1])
        if is_command(rest[:1]):
            name = rest.pop(0)
    return run_command(name, rest)


def run_command(name: str, args: Sequence[str]) -> int:
    """Run a command with the arguments that follow its name; return its exit code."""
    command = COMMANDS[name]
    return command.load()([*command.args, *args]) or 0


def is_command(args: Sequence[str]) -> bool:
    """Return True for arguments that begin with a command: `./run-ssh stop RUN`.

    A launch takes a file of its name for a host file.
    """
    name = args[0] if args else ""
    return name in COMMANDS and not (is_launch(name) and Path(name).is_file())


def is_launch(name: str) -> bool:
    """Return True for a command that launches, or checks what would be launched."""
    return name in COMMANDS and COMMANDS[name].group == LAUNCHES


def run_behind(options: Sequence[str], args: Sequence[str]) -> int:
    """Run the command that follows a launch's options, as in `./run-ssh --ssh-config F ps`."""
    name, *rest = args
    if name not in _DRAW:  # the others print plain lines anyway
        options = [option for option in options if option != "--plain"]
    if options and COMMANDS[name].group not in (LAUNCHES, "Runs"):
        raise UsageError(f"{options[0]}: {name} has no such option; type: {called(name)} --help")
    return run_command(name, [*options, *rest])


def _meant(arg: str) -> str:
    """Return the first argument after a command by our name for it, unless a file is called so."""
    return arg if Path(arg).exists() else ALIASES.get(arg, arg)


def help_text() -> str:
    """Return the help of `rackrun`: examples first, then the commands by group."""
    lines = ["usage: rackrun COMMAND [words]\n\nExamples:\n", _EXAMPLES]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        members = [(name, one.help) for name, one in COMMANDS.items() if one.group == group]
        lines += [f"\n{group}:\n", *(f"  {name:11} {text}\n" for name, text in members)]
    return "".join([*lines, "\nrackrun COMMAND --help shows the options of a command.\n"])


def _unknown(name: str) -> str:
    """Return the message for an unknown command."""
    from rackrun.commandline import unknown_command
    from rackrun.user_code.tasks import find_task

    if name == "train":
        return "train: no such command; type: rackrun local TASK, or rackrun ssh HOSTS TASK"
    if find_task(name):
        return f"{name} is a task; type: rackrun local {name}, or rackrun ssh HOSTS {name}"
    return unknown_command(name, COMMANDS, "rackrun")
