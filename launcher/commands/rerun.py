"""`rerun RUN`: start a run again, with the settings that this machine launched it with.

They are in run.toml of its folder. No host supplies that file: results come without it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from itertools import pairwise, takewhile

from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.commands.parse import split
from rackrun.launcher.commands.ray import RayOptions
from rackrun.launcher.commands.settings import NodeOptions, SshOptions
from rackrun.launcher.output.console import say
from rackrun.launcher.run.settings import LocalOptions
from rackrun.launcher.settings_file import SettingsFile, read_settings
from rackrun.runs import Run, find_run, unknown_run
from rackrun.user_code.tasks import find_task

SETTINGS = {"local": LocalOptions, "ssh": SshOptions, "ray": RayOptions, "node": NodeOptions}
ABOUT = """\
usage: {prog} RUN [options] [TASK] [task options]

Start a run again as a new one, with the settings of its launch. RUN is an ID,
the start of an ID, a name, a folder, or latest. Options that you type override
those of the run.

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
    run, file, typed = read(args)
    module = import_module(f"rackrun.launcher.commands.{file.launch}")
    if not file.tasks:
        _refuse_options(file, split(_before_dashes(typed), SETTINGS[file.launch], file.launch)[1])
    tables = (file.launcher, *file.tasks.values())
    resumed_another = any(table.keys() & {"auto-resume", "resume"} for table in tables)
    is_resumed = any(word.partition("=")[0] == "--resume" for word in typed)
    from_where = ", from its beginning" if resumed_another and not is_resumed else ""
    say(f"{run} again{from_where}")
    code: int = module.main(typed, as_a_new_run(file))
    return code


def read(args: Sequence[str]) -> tuple[Run, SettingsFile, list[str]]:
    """Return the run that is meant, its settings, and the other arguments."""
    args_before_dashes = _before_dashes(args)
    for options in (SshOptions, LocalOptions, NodeOptions):  # the run says only later which it has
        launch_words, rest = split(args_before_dashes, options, "rerun")
        if rest and not rest[0].startswith("-"):
            break
    else:
        raise UsageError(f"rerun: which run? type, for example: {called('rerun')} latest")
    run = find_run(rest[0])
    if run is None:
        raise unknown_run(rest[0])
    for option, value in pairwise(launch_words):
        if option == "--config":
            raise UsageError(
                f"--config {value}: a run that is started again has its own settings; leave it out"
            )
    file = _settings_of(run)
    if not file.launch:
        raise UsageError(f"{file.path}: launch: missing; type: --config {file.path}")
    return run, file, [*launch_words, *rest[1:], *args[len(args_before_dashes) :]]


def _before_dashes(args: Sequence[str]) -> list[str]:
    return list(takewhile(lambda arg: arg != "--", args))


def _refuse_options(file: SettingsFile, rest: Sequence[str]) -> None:
    # A command of the run's own has no options that could be changed here.
    if option := next((arg for arg in rest[:2] if arg.startswith("-")), ""):
        if find_task(rest[0]):
            return
        whole = shlex.join([*file.command, *rest[rest.index(option) :]])
        raise UsageError(
            f"{option}: not an option of {called(file.launch)}; to change the run's own command,"
            f" type all of it: -- {whole}"
        )


def _settings_of(run: Run) -> SettingsFile:
    path = run.folder.settings
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
