"""The commands, and how the user calls them: what messages suggest to type."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rackrun.contract import variables


class ModuleCommand(NamedTuple):
    """A command: its group and line in the help, and the module that runs it."""

    group: str
    help: str
    module: str
    """It has `main(args)`, which returns an exit code or None; imported when it is called."""
    args: tuple[str, ...] = ()
    """Arguments to insert before those of the user."""


_LAUNCHER = "rackrun.launcher.commands"
_MANAGE = f"{_LAUNCHER}.manage"

COMMANDS = {
    "local": ModuleCommand("Launch", "Run a task or script on this machine.", f"{_LAUNCHER}.local"),
    "ssh": ModuleCommand("Launch", "Run a task or script on hosts, over SSH.", f"{_LAUNCHER}.ssh"),
    "ray": ModuleCommand("Launch", "Run a task or script on a Ray cluster.", f"{_LAUNCHER}.ray"),
    "node": ModuleCommand("Launch", "Run on this node of a scheduler's job.", f"{_LAUNCHER}.node"),
    "check": ModuleCommand(
        "Launch", "Check hosts, and start nothing.", f"{_LAUNCHER}.ssh", ("--check",)
    ),
    "rack": ModuleCommand("Runs", "Show who uses which host.", "rackrun.launcher.catalog.rack"),
    "ps": ModuleCommand("Runs", "List the runs of this folder.", "rackrun.launcher.catalog.ps"),
    "rerun": ModuleCommand("Runs", "Start a run again, as a new one.", f"{_LAUNCHER}.rerun"),
    "report": ModuleCommand(
        "Runs", "Draw report.html of a run; compare runs.", "rackrun.run_report.__main__"
    ),
    "attach": ModuleCommand("Runs", "Show a run, live from its first line.", _MANAGE, ("attach",)),
    "logs": ModuleCommand("Runs", "Print the output of the ranks of a run.", _MANAGE, ("logs",)),
    "status": ModuleCommand("Runs", "Show the progress and hosts of a run.", _MANAGE, ("status",)),
    "stop": ModuleCommand("Runs", "Save and stop a run; verify its hosts.", _MANAGE, ("stop",)),
    "samples": ModuleCommand(
        "Runs", "List the samples that a run could see.", "rackrun.cli.samples"
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
"""The commands, in the order of the help."""

MANAGES = ("ps", "rack", "attach", "logs", "status", "stop", "report", "predict")
"""The commands that --on runs on another machine, without anything of this folder."""

LAUNCHES = ("local", "ssh", "ray", "node", "check")
"""The commands that launch, or check what would be launched."""

_SCRIPTS = ("local", "ssh", "ray")
"""The commands that are scripts of the repository: `./run-local` is `rackrun local`."""

_OF_HOSTS = ("check", "rack", "ps", "attach", "logs", "status", "stop")
"""The commands that messages call by `./run-ssh`; all others by `./run-local`."""


class _Caller:
    """How messages call commands: as the user did, or as the launcher that started us was."""

    typed = os.environ.get(variables.TYPED, "")
    on = os.environ.get(variables.ON, "")
    has_scripts = (Path(__file__).parents[1] / "run-ssh").exists()
    by_name = typed.startswith("rackrun ") or not (typed or has_scripts)
    folder = typed.partition("run-")[0] if "run-" in typed.partition(" ")[0] else "./"
    script = "run-local"
    """The script that `rerun` is called by: the one that was typed."""


def call_by(script: str, folder: str) -> None:
    """Have messages call commands as this call did: by a script in a folder, or as `rackrun`."""
    _Caller.by_name, _Caller.folder = not script, folder
    if script.removeprefix("run-") in _SCRIPTS:
        _Caller.script = script


def called(name: str) -> str:
    """Return a command as the user would call it here: `rackrun stop`, or `./run-ssh stop`."""
    is_there = _Caller.on and name in (*MANAGES, "rerun")
    return f"{_called(name)} --on {_Caller.on}" if is_there else _called(name)


def _called(name: str) -> str:
    if _Caller.by_name:
        return f"rackrun {name}"
    if name in _SCRIPTS:
        return f"{_Caller.folder}run-{name}"
    script = "run-ssh" if name in _OF_HOSTS else "run-local"
    if name == "rerun":
        script = _Caller.script
    return f"{_Caller.folder}{script} {'--check' if name == 'check' else name}"


def program() -> list[str]:
    """Return the arguments that start `rackrun` in any folder, just its name if that is enough."""
    if _Caller.by_name and shutil.which("rackrun"):
        return ["rackrun"]
    return [sys.executable, "-P", str(Path(__file__).with_name("__main__.py"))]


def is_command(args: Sequence[str]) -> bool:
    """Return True for arguments that begin with a command: `./run-ssh stop RUN`.

    A launch takes a file of its name for a host file.
    """
    name = args[0] if args else ""
    return name in COMMANDS and not (name in LAUNCHES and Path(name).is_file())
