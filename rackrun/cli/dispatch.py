"""`rackrun COMMAND ...`, or a script's path in place of the command: which module runs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rackrun.commands import COMMANDS, LAUNCHES, call_by, is_command
from rackrun.errors import UsageError

VERSION = "--version"
ALIASES = {"help": "--help", "version": VERSION, "list": "ps"}
"""Names that other programs use for these."""

_EXAMPLES = """\
  rackrun local                                      a demo that needs no data
  rackrun local --nproc 2 -- python train.py         your script, on two ranks
  rackrun check hosts.txt                            check every host
  rackrun ssh --sync hosts.txt -- python train.py    copy your code, run it on all hosts
  rackrun local classify --data ~/images             a folder per class -> a model
  rackrun ssh hosts.txt catdog --data data/shards    train on shards, on all hosts
"""


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
    call_by(script and f"run-{name}", folder)
    if _is_elsewhere(args):
        from rackrun.launcher.commands.on import run_on_host

        return run_on_host(args)
    if VERSION in (name, *map(_by_our_name, rest[:1])):
        from rackrun.commandline.program import print_version

        return print_version()
    if name not in COMMANDS:
        raise UsageError(_unknown(*args))
    if name in LAUNCHES:
        rest[:1] = map(_by_our_name, rest[:1])
        if is_command(rest):  # ./run-ssh ps
            name, *rest = rest
    command = COMMANDS[name]
    code: int | None = import_module(command.module).main([*command.args, *rest])
    return code or 0


def _is_elsewhere(args: Sequence[str]) -> bool:
    ours = args[: args.index("--")] if "--" in args else args
    is_help = any(arg in ("-h", "--help") for arg in ours)
    return not is_help and any(arg == "--on" or arg.startswith("--on=") for arg in ours)


def _by_our_name(arg: str) -> str:
    """Return the first argument after a command by our name for it, unless a file is called so."""
    return arg if Path(arg).exists() else ALIASES.get(arg, arg)


def help_text() -> str:
    """Return the help of `rackrun`: examples first, then the commands by group."""
    lines = ["usage: rackrun COMMAND [arguments]\n\nExamples:\n", _EXAMPLES]
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
