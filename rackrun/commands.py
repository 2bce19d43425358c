"""The names of the commands, and how the user calls them: what messages suggest to type."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rackrun.contract import variables

LAUNCHES = ("local", "ssh", "ray", "node", "check")
"""The commands that launch, or check what would be launched."""

NAMES = (
    *(*LAUNCHES, "rack", "ps", "rerun", "report", "attach", "logs", "status", "stop"),
    *("evaluate", "predict", "models", "export"),
    *("convert", "doctor", "serve", "completion"),
)
"""All commands; rackrun/cli/dispatch.py has the module of each."""

_SCRIPTS = ("local", "ssh", "ray")
"""The commands that are scripts of the repository: `./run-local` is `rackrun local`."""

_OF_HOSTS = ("check", "rack", "ps", "attach", "logs", "status", "stop")
"""The commands that messages call by `./run-ssh`; all others by `./run-local`."""


class _Caller:
    """How messages call commands: as the user did, or as the launcher that started us was."""

    typed = os.environ.get(variables.TYPED, "")
    has_scripts = (Path(__file__).parents[1] / "run-ssh").exists()
    by_name = typed.startswith("rackrun ") or not (typed or has_scripts)
    folder = typed.partition("run-")[0] if "run-" in typed.partition(" ")[0] else "./"


def call_by(script: str, folder: str) -> None:
    """Have messages call commands as this call did: by a script in a folder, or as `rackrun`."""
    _Caller.by_name, _Caller.folder = not script, folder


def called(name: str) -> str:
    """Return a command as the user would call it here: `rackrun stop`, or `./run-ssh stop`."""
    if _Caller.by_name:
        return f"rackrun {name}"
    if name in _SCRIPTS:
        return f"{_Caller.folder}run-{name}"
    script = "run-ssh" if name in _OF_HOSTS else "run-local"
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
    return name in NAMES and not (name in LAUNCHES and Path(name).is_file())
