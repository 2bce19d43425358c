"""`rerun RUN`: start a run again, with the settings that this machine launched it with.

They are in run.toml of its folder. No host supplies that file: results come without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.commands.parse import split
from rackrun.launcher.commands.settings import SshOptions
from rackrun.launcher.output.console import say
from rackrun.launcher.settings_file import SettingsFile, parsed_settings, read_settings
from rackrun.run_folder import RunFolder
from rackrun.runs import Run, find_run, unknown_run

ABOUT = """\
usage: {prog} RUN [options] [TASK] [task options]

Start a run again as a new one, with the settings of its launch. RUN is an ID, the start of one, a
name, a folder, or latest. Options that are typed win over those of the run.

Examples:
  {prog} latest
  {prog} lr-half --name lr-half-again
  {prog} 3fa81c02 --epochs 3 --seed 2     options of its task
  {prog} 3fa81c02 --resume 3fa81c02       continue it instead of starting from its beginning
"""


def main(args: Sequence[str]) -> int:
    """Start the run again; return its exit code."""
    if args and args[0] in ("-h", "--help"):
        sys.stdout.write(ABOUT.replace("{prog}", called("rerun")))
        return 0
    run, file, typed = read(args)
    tables = (file.launcher, *file.tasks.values())
    resumes = any(table.keys() & {"auto-resume", "resume"} for table in tables)
    say(f"{run} again" + (", from its beginning" if resumes else ""))
    module = import_module(f"rackrun.launcher.commands.{file.launch}")
    code: int = module.main(typed, as_a_new_run(file))
    return code


def read(args: Sequence[str]) -> tuple[Run, SettingsFile, list[str]]:
    """Return the run that is meant, its settings, and the other arguments."""
    count = args.index("--") if "--" in args else len(args)
    words, rest = split(args[:count], SshOptions, "rerun")
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"rerun of which run? type for example: {called('rerun')} latest")
    run = find_run(rest[0])
    if run is None:
        raise unknown_run(rest[0])
    file = _settings_of(run)
    if not file.launch:
        raise UsageError(f"{file.path}: launch: missing; type: --config {file.path}")
    return run, file, [*words, *rest[1:], *args[count:]]


def _settings_of(run: Run) -> SettingsFile:
    # The record of a detached run has them as they were typed here; a host that shares the disk
    # can write to the run folder.
    path = RunFolder(run.folder).settings if run.folder else Path("run.toml")
    if run.record and run.record.settings:
        return parsed_settings(path, run.record.settings)
    if not path.is_file():
        raise UsageError(f"{run} has no run.toml: it cannot be started again")
    return read_settings(path)


def as_a_new_run(file: SettingsFile) -> SettingsFile:
    """Return settings without the options by which the run itself continued another one."""
    launcher = {key: value for key, value in file.launcher.items() if key != "auto-resume"}
    tasks = {
        task: {key: value for key, value in table.items() if key != "resume"}
        for task, table in file.tasks.items()
    }
    return replace(file, launcher=launcher, tasks=tasks)
