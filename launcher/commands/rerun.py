"""`rerun RUN`: start a run again, with the settings that this machine launched it with.

They are in run.toml of its folder. No host supplies that file: results come without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.settings_file import SettingsFile, read_settings
from rackrun.runs import find_run, unknown_run

ABOUT = """\
usage: {prog} RUN [options] [TASK] [task options]

Start a run again as a new one, with the settings of its launch. RUN comes first:
an ID, the start of an ID, a name, a folder, or latest. Options that you type
override those of the run.

Examples:
  {prog} latest
  {prog} lr-half --name lr-half-again
  {prog} 3fa81c02 --epochs 3 --seed 2   options of its task
  {prog} 3fa81c02 --resume 3fa81c02     continue from its checkpoint
"""


def main(args: Sequence[str]) -> int:
    """Start the run again; return its exit code."""
    if args and args[0] in ("-h", "--help"):
        sys.stdout.write(ABOUT.replace("{prog}", called("rerun")))
        return 0
    file = settings_to_repeat(args)
    module = import_module(f"rackrun.launcher.commands.{file.launch}")
    code: int = module.main(args[1:], file)
    return code


def settings_to_repeat(args: Sequence[str]) -> SettingsFile:
    """Return the settings of the run that the first argument means."""
    name = next(iter(args), "")
    if not name or name.startswith("-"):
        raise UsageError(f"rerun: name the run first; for example: {called('rerun')} latest")
    run = find_run(name)
    if run is None:
        raise unknown_run(name)
    path = run.folder.settings
    if not path.is_file():
        raise UsageError(f"{run} has no run.toml: it cannot be started again")
    file = read_settings(path)
    if not file.launch:
        raise UsageError(f"{path}: launch: missing; type: --config {path}")
    return file
