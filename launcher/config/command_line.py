"""Between a command line and a settings file: the arguments with a file's settings, and back."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from launcher.config.settings_file import (
    SettingsFile,
    check_keys,
    check_kind,
    key_location,
    options_of,
    toml_of,
    words_of,
)
from launcher.run.job import Command, TaskWork, Work
from launcher.run.settings import Options
from rackrun.commandline.options import options
from rackrun.errors import UsageError
from rackrun.user_code.tasks import find_task

OPTION = "--config"
NOT_KEPT = {"config", "dry_run", "json", "check"}
"""Options that start no run, or name the file itself."""
HEAD = "# The settings of this run; `rerun` starts it again.\n"
HOSTS = "hosts"
"""The option that is typed without its name."""
NO_FILE = {"--slurm", "--host-list"}
"""Options that name the hosts in place of a file."""


def file_in(args: Sequence[str]) -> str:
    """Return the settings file that the launcher's options name; empty without one."""
    for number, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name == OPTION:
            if not equals and number + 1 == len(args):
                raise UsageError(f"{OPTION}: needs a value")
            return value if equals else args[number + 1]
    return ""


def launcher_words(
    file: SettingsFile, settings: type[Options], typed: Collection[str]
) -> list[str]:
    """Return the launcher's options of a file, but for those that were typed."""
    kinds = _kinds(settings)
    check_keys(file.path, "launcher", file.launcher, kinds)
    for key, value in file.launcher.items():
        check_kind(file.path, key, value, kinds[key])
    left = {
        key: value
        for key, value in file.launcher.items()
        if key not in (*typed, HOSTS) and value is not False
    }
    return list(words_of(left, repeat=True))


def work_words(file: SettingsFile, rest: Sequence[str]) -> list[str]:
    """Return task or command, and the task's options: what was typed wins over the file."""
    if rest and (not find_task(rest[0]) or not all(arg.startswith("-") for arg in rest[1:2])):
        return list(rest)
    if not rest and file.command:
        return ["--", *file.command]
    if not rest and len(file.tasks) > 1:
        names = " and ".join(file.tasks)
        raise UsageError(f"{file.path} has {names}: type which of them")
    name = rest[0] if rest else next(iter(file.tasks), "")
    if not name:
        return []
    options = file.tasks.get(name, {})
    typed = typed_options(rest[1:])
    left = {key: value for key, value in options.items() if key not in typed}
    return [name, *words_of(left), *rest[1:]]


def typed_options(args: Sequence[str]) -> set[str]:
    """Return the options among arguments, without dashes: `--no-flip` speaks of `flip`."""
    names = {arg.partition("=")[0].removeprefix("--") for arg in args if arg[:2] == "--"}
    return names | {name.removeprefix("no-") for name in names}


def without_file(args: Sequence[str]) -> list[str]:
    """Return the launcher's options without the one that names a settings file."""
    left = list(args)
    for number, arg in enumerate(args):
        if arg.partition("=")[0] == OPTION:
            del left[number : number + (1 if "=" in arg else 2)]
            break
    return left


def with_place(error: UsageError, file: SettingsFile, args: Sequence[str]) -> UsageError:
    """Return an error about an option with file and key, if the option is from there."""
    match = re.match(r"--(?:no-)?([\w-]+)", str(error))
    key = match[1].replace("_", "-") if match else ""
    if key and key not in typed_options(args):
        for table, options in {"launcher": file.launcher, **file.tasks}.items():
            if key in options:
                return UsageError(f"{file.path}: {key_location(table, key)}: {error}")
    return error


def settings_text(way: str, settings: Options, work: Work, typed: Sequence[str] = ()) -> str:
    """Return a launch as a settings file, with the command that was typed.

    Of --secret it has the names only.
    """
    launcher = _changed(settings)
    if hasattr(settings, HOSTS) and not {"host-list", "slurm"} & launcher.keys():
        launcher[HOSTS] = str(getattr(settings, HOSTS))
    keys: dict[str, Any] = {"launch": way, **({"typed": typed} if typed else {})}
    tables: dict[str, Mapping[str, Any]] = {"launcher": launcher}
    if isinstance(work, TaskWork):
        tables[work.task] = options_of(work.options)
    elif isinstance(work, Command):
        keys["command"] = work.args
    return HEAD + toml_of(keys, tables)


def _changed(settings: Options) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in options(type(settings)):
        value = reduce(getattr, option.whole, settings)
        if value != option.default and option.field not in NOT_KEPT:
            values[option.key] = str(value) if isinstance(value, Path) else value
    return values


def _kinds(settings: type[Options]) -> dict[str, type]:
    """Return the options of a way to launch and the types of their values."""
    return {
        option.key: tuple if option.is_repeatable else option.type
        for option in options(settings)
        if option.field not in NOT_KEPT
    }
