"""`rerun RUN`: start a run again, with the settings that this machine launched it with.

They are in run.toml of its folder. No host supplies that file: results come without it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rackrun.commandline.parser import current_names
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.commands.parse import RENAMED, flags, names_of, split, with_settings
from rackrun.launcher.commands.settings import SshOptions
from rackrun.launcher.output.console import say
from rackrun.launcher.run.settings import Options
from rackrun.launcher.settings_file import SettingsFile, parsed_settings, read_settings, with_place
from rackrun.run_folder import RunFolder
from rackrun.runs import Run, find_run, unknown_run
from rackrun.user_code.tasks import find_task

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
    launch_args = command_line(file, typed)
    tables = (file.launcher, *file.tasks.values())
    resumes = any(table.keys() & {"auto-resume", "resume"} for table in tables)
    say(f"{run} again" + (", from its beginning" if resumes else ""))
    try:
        code: int = _module_of(file.launch).main(launch_args)
        return code
    except UsageError as error:
        raise with_place(error, file, typed) from None


def read(args: Sequence[str]) -> tuple[Run, SettingsFile, list[str]]:
    """Return the run that is meant, its settings, and the other arguments."""
    options, rest = split(args, SshOptions)
    if not rest or rest[0] == "--":
        raise UsageError(f"rerun of which run? type for example: {called('rerun')} latest")
    run = find_run(rest[0])
    if run is None:
        raise unknown_run(rest[0])
    file = _settings_of(run)
    if not file.launch:
        raise UsageError(f"{file.path}: launch: missing; type: --config {file.path}")
    return run, file, [*options, *rest[1:]]


def _settings_of(run: Run) -> SettingsFile:
    # The record of a detached run has them as they were typed here; a host that shares the disk
    # can write to the run folder.
    path = RunFolder(run.folder).settings if run.folder else Path("run.toml")
    if run.record and run.record.settings:
        return parsed_settings(path, run.record.settings)
    if not path.is_file():
        raise UsageError(f"{run} has no run.toml: it cannot be started again")
    return read_settings(path)


def command_line(file: SettingsFile, typed: Sequence[str]) -> list[str]:
    """Return the arguments of the launch: the run's settings, overridden by what is typed."""
    options = _module_of(file.launch).OPTIONS
    plain_words = int(file.launch == "ssh")  # the host file
    args = _with_task(file, typed, options, plain_words)
    # as a new run: without the options by which the run itself continued another one
    launcher = {key: value for key, value in file.launcher.items() if key != "auto-resume"}
    tasks = {
        task: {key: value for key, value in table.items() if key != "resume"}
        for task, table in file.tasks.items()
    }
    fresh = replace(file, launcher=launcher, tasks=tasks)
    return with_settings(fresh, args, options, plain_words)


def _module_of(launch: str) -> Any:
    return import_module(f"rackrun.launcher.commands.{launch}")


def _with_task(
    file: SettingsFile, typed: Sequence[str], options: type[Options], plain_words: int
) -> list[str]:
    # The typed arguments, with the run's task before those options that are the task's.
    task = next(iter(file.tasks), "")
    if task in typed or "--" in typed:
        return list(typed)
    launcher: list[str] = []
    others: list[str] = []
    groups = list(_groups(typed, set(names_of(options)), flags(options)))
    for number, (is_launchers, option_group) in enumerate(groups):
        if not option_group[0].startswith("-"):
            if not plain_words or find_task(option_group[0]):  # another task, with its options
                return [*launcher, *(arg for _, group in groups[number:] for arg in group)]
            plain_words -= 1
        (launcher if is_launchers else others).extend(option_group)
    if others and not task:
        whole = shlex.join([*file.command, *others])
        raise UsageError(
            f"{others[0]}: no option of {called(file.launch)}; to change the run's own command,"
            f" type it whole: -- {whole}"
        )
    return [*launcher, task, *others] if others else launcher


def _groups(
    typed: Sequence[str], names: set[str], switches: set[str]
) -> Iterator[tuple[bool, list[str]]]:
    # Each option with its values, or a plain word; and whether it is the launcher's. How many
    # values an option of a task takes is not known here: it gets all words up to the next option.
    left = list(typed)
    while left:
        group = [left.pop(0)]
        name = next(current_names([group[0].partition("=")[0]], RENAMED))
        is_option = name.startswith("-")
        is_launchers = not is_option or name in names or name in switches
        if is_option and is_launchers and "=" not in group[0] and name not in switches:
            group += left[:1]
            del left[:1]
        while not is_launchers and left and not left[0].startswith("--"):
            group.append(left.pop(0))
        yield is_launchers, group
