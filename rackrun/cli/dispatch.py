"""`rackrun COMMAND ...`, or a script's path in place of the command: which module runs it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rackrun.commands import LAUNCHES, call_by, called, is_command
from rackrun.errors import UsageError


class ModuleCommand(NamedTuple):
    """A command: its group and line in the help, and the module that runs it."""

    group: str
    help: str
    module: str
    """It has `main(args)`, which returns an exit code or None."""
    args: tuple[str, ...] = ()
    """Arguments to insert before those of the user."""

    def run(self, args: Sequence[str]) -> int:
        """Import the module and run the command; return its exit code."""
        code: int | None = import_module(self.module).main([*self.args, *args])
        return code or 0


_SSH = "rackrun.launcher.commands.ssh"
_MANAGE = "rackrun.launcher.commands.manage"

COMMANDS = {
    "local": ModuleCommand("Train", "Train on this machine.", "rackrun.launcher.commands.local"),
    "ssh": ModuleCommand("Train", "Train on the hosts of a file, over SSH.", _SSH),
    "ray": ModuleCommand(
        "Train", "Train on the nodes of a Ray cluster.", "rackrun.launcher.commands.ray"
    ),
    "node": ModuleCommand(
        "Train", "Train on this node of a scheduler's job.", "rackrun.launcher.commands.node"
    ),
    "check": ModuleCommand("Train", "Check hosts and start nothing.", _SSH, ("--check",)),
    "rack": ModuleCommand("Runs", "Show all hosts in a table.", "rackrun.launcher.catalog.rack"),
    "ps": ModuleCommand(
        "Runs", "List the runs known here and on hosts.", "rackrun.launcher.catalog.ps"
    ),
    "rerun": ModuleCommand(
        "Runs", "Start a run again, as a new one.", "rackrun.launcher.commands.rerun"
    ),
    "report": ModuleCommand(
        "Runs", "Draw report.html of a run; compare runs.", "rackrun.run_report.__main__"
    ),
    "attach": ModuleCommand("Runs", "Show a run from its first line on.", _MANAGE, ("attach",)),
    "logs": ModuleCommand("Runs", "Print the output of the ranks of a run.", _MANAGE, ("logs",)),
    "status": ModuleCommand(
        "Runs", "Show the processes of a run on every host.", _MANAGE, ("status",)
    ),
    "stop": ModuleCommand(
        "Runs", "Stop a run as Ctrl-C would; verify every host.", _MANAGE, ("stop",)
    ),
    "evaluate": ModuleCommand(
        "Models", "Evaluate a model on a split.", "rackrun.training.judge.command"
    ),
    "predict": ModuleCommand("Models", "Classify images with a model.", "rackrun.training.predict"),
    "models": ModuleCommand(
        "Models", "List published models.", "rackrun.training.models.list_command"
    ),
    "export": ModuleCommand(
        "Models", "Export a model to other formats.", "rackrun.training.export.command"
    ),
    "convert": ModuleCommand(
        "Data", "Convert images to tar shards; verify them.", "rackrun.convert.__main__"
    ),
    "doctor": ModuleCommand(
        "Data", "Look for copies, odd images, wrong labels.", "rackrun.cli.doctor"
    ),
    "serve": ModuleCommand("Data", "Serve a folder of shards over HTTP.", "rackrun.nginx.__main__"),
    "completion": ModuleCommand(
        "Shell", "Print completion for bash, zsh or fish.", "rackrun.cli.completion"
    ),
}
"""The commands, in the order of the help; a module is imported only when its command is called."""

VERSION = "--version"
ALIASES = {"help": "--help", "version": VERSION, "list": "ps"}
"""Names that other programs use for these."""

_DRAW = ("local", "ssh", "ray", "node", "attach", "rerun")
"""The commands with a dashboard, and so with --plain."""

_EXAMPLES = """\
  rackrun local                                              a demo that needs no data
  rackrun convert folder ~/images data/shards                one folder of images per class
  rackrun local catdog --data data/shards --epochs 30        train on this machine
  rackrun check hosts.txt                                    check every host
  rackrun ssh hosts.txt catdog --data data/shards            train on all hosts
  rackrun ssh --detach hosts.txt -- python train.py          any script, under torchrun
"""


def run(args: Sequence[str]) -> int:
    """Run the command that the first argument names: `ssh`, or a script's path, as `./run-ssh`."""
    if not args:
        sys.stderr.write(help_text())
        return UsageError.exit_code
    if args[0] in ("-h", "--help", "help"):
        sys.stdout.write(help_text())
        return 0
    if _is_elsewhere(args):
        from rackrun.launcher.commands.on import split_host, there

        host, args = split_host(args)
        return there(host, args)
    folder, script, name = args[0].rpartition("run-")
    name, rest = ALIASES.get(name, name), list(args[1:])
    call_by(script, folder)
    if VERSION in (name, *map(_meant, rest[:1])):
        from rackrun.commandline.program import print_version

        return print_version()
    if name not in COMMANDS:
        raise UsageError(_unknown(*args))
    if name in LAUNCHES:
        rest[:1] = map(_meant, rest[:1])
        options, behind = _options_of_launch(name, rest)
        if behind[2:] and behind[0].startswith("-") and is_command(behind[2:]):
            raise _not_of(behind[2], behind[0])
        if is_command(behind):
            return _run_behind(options, behind)
    return COMMANDS[name].run(rest)


def _is_elsewhere(args: Sequence[str]) -> bool:
    ours = args[: args.index("--")] if "--" in args else args
    is_help = any(arg in ("-h", "--help") for arg in ours)
    return not is_help and any(arg == "--on" or arg.startswith("--on=") for arg in ours)


def _options_of_launch(name: str, args: Sequence[str]) -> tuple[list[str], list[str]]:
    if not args or not args[0].startswith("-"):
        return [], list(args)
    from rackrun.launcher.commands.parse import split

    before = list(itertools.takewhile(lambda arg: arg != "--", args))
    options: type[Any] = import_module(COMMANDS[name].module).OPTIONS
    return split(before, options, name)


def _run_behind(options: Sequence[str], args: Sequence[str]) -> int:
    """Run the command that follows a launch's options, as in `./run-ssh --ssh-config F ps`."""
    name, *rest = args
    if name not in _DRAW:  # the others print plain lines anyway
        options = [option for option in options if option != "--plain"]
    if options and COMMANDS[name].group not in ("Train", "Runs"):
        raise _not_of(name, options[0])
    return COMMANDS[name].run([*options, *rest])


def _not_of(command: str, option: str) -> UsageError:
    return UsageError(f"{option}: {command} has no such option; type: {called(command)} --help")


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


def _unknown(name: str, *rest: str) -> str:
    from rackrun.commandline.parser import unknown_command
    from rackrun.user_code.tasks import find_task

    if name.startswith("-"):
        command = next((arg for arg in rest if arg in COMMANDS), "COMMAND")
        return f"{name}: options follow the command; type: rackrun {command} --help"
    if name == "train":
        return "train: no such command; type: rackrun local TASK, or rackrun ssh HOSTS TASK"
    if find_task(name):
        return f"{name} is a task; type: rackrun local {name}, or rackrun ssh HOSTS {name}"
    return unknown_command(name, COMMANDS, "rackrun")
