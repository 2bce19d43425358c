"""A settings file: the options of the launcher, and a task with its options or a command.

    launch = "ssh"                       # what `rerun` starts: local, ssh, ray or node
    command = ["python", "train.py"]     # unless a table names a task

    [launcher]
    hosts = "hosts.txt"
    max-restarts = 2

    [imagenet]
    epochs = 90
    lr = 0.5

Keys are options without their dashes. A file that launches of several kinds share has no more than
the tables. --config reads one into a command line, and a launch writes its own into the run folder.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from rackrun.commandline import removed
from rackrun.commandline.options import options
from rackrun.data_location import PIPE, parts_of
from rackrun.errors import UsageError
from rackrun.launcher.run.job import Command, TaskWork, Work
from rackrun.launcher.run.settings import Options
from rackrun.user_code.tasks import find_task, known_tasks

KEYS = ("launch", "command", "launcher")
"""The keys besides the names of tasks."""
WAYS = ("local", "ssh", "ray", "node")
KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "a list of texts",
}

Table = Mapping[str, Any]

NOT_KEPT = {"config", "dry_run", "json", "check"}
"""Options that start no run, or name the file itself."""
HEAD = "# The settings of this run; `rerun` starts it again.\n"
HOSTS = "hosts"
"""The option that is typed without its name."""
CONTINUING = {"auto-resume", "resume"}
"""Options that continue an earlier run."""
NO_FILE = {"--slurm", "--host-list"}
"""Options that name the hosts in place of a file."""


@dataclass(frozen=True)
class SettingsFile:
    """The content of a settings file; keys have dashes."""

    path: Path
    launch: str
    command: tuple[str, ...]
    launcher: Table
    tasks: Mapping[str, Table]
    """Options by the name of their task."""

    @property
    def continues_a_run(self) -> bool:
        """Return True if they continue the run of another launch."""
        tables = (self.launcher, *self.tasks.values())
        return any(table.keys() & CONTINUING for table in tables)

    def as_a_new_run(self) -> SettingsFile:
        """Return settings without the options by which a launch has continued another run."""
        launcher, *tables = (
            {key: value for key, value in table.items() if key not in CONTINUING}
            for table in (self.launcher, *self.tasks.values())
        )
        return replace(self, launcher=launcher, tasks=dict(zip(self.tasks, tables, strict=True)))


def read_settings(path: Path) -> SettingsFile:
    """Return the settings of a file; raise UsageError for a file that has none."""
    try:
        return parsed_settings(path, path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not TOML: {error}") from None


def parsed_settings(path: Path, text: str) -> SettingsFile:
    """Return the settings that a text has; messages name it by `path`."""
    import tomllib  # most launches have no such file

    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    named = {key for key in tables if key not in KEYS and find_task(key)}
    others = [key for key in tables if key not in named]
    _check_keys(path, "", others, (*KEYS, *known_tasks()))
    launch, command = tables.get("launch", ""), tables.get("command", [])
    if launch and launch not in WAYS:
        raise UsageError(f"{path}: launch: {launch!r}: must be one of {', '.join(WAYS)}")
    if not _is_a(command, tuple) or (command == [] and "command" in tables):
        raise UsageError(f"{path}: command: must be a list of texts")
    tables = {
        name: _table(path, name, tables[name]) for name in tables if name in {"launcher", *named}
    }
    return SettingsFile(path, launch, tuple(command), tables.pop("launcher", {}), tables)


def _table(path: Path, name: str, content: object) -> Table:
    if not isinstance(content, dict):
        raise UsageError(f"{path}: {name}: must be a table: [{name}]")
    for key, value in content.items():
        is_plain = isinstance(value, bool | int | float | str)
        if not is_plain and not _is_a(value, tuple):
            raise UsageError(f"{path}: {name}.{key}: must be one value or a list of texts")
        is_command = isinstance(value, str) and any(p.startswith(PIPE) for p in parts_of(value))
        if is_command and key.replace("_", "-") in ("data", "eval-data"):
            raise UsageError(f"{path}: {name}.{key}: {PIPE} is accepted only on the command line")
    return {key.replace("_", "-"): value for key, value in content.items()}


def _is_a(value: object, kind: type) -> bool:
    if kind is tuple:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if isinstance(value, bool):  # which Python also counts as an int
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind if kind in KINDS else str)


def _check_keys(path: Path, prefix: str, keys: Collection[str], valid: Collection[str]) -> None:
    for key in keys:
        if key not in valid:
            if instead := removed.OPTIONS.get(f"--{key}"):
                raise UsageError(f"{path}: {prefix}{key}: no longer an option; {instead}")
            close = difflib.get_close_matches(key, valid, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"{path}: {prefix}{key}: no such key{meant}")


def launcher_values(file: SettingsFile, settings: type[Options]) -> dict[str, Any]:
    """Return what a file sets of a launch's options, by field; UsageError for what cannot be."""
    rows = {row.key: row for row in options(settings) if row.field not in NOT_KEPT}
    _check_keys(file.path, "launcher.", file.launcher, rows)
    for key, value in file.launcher.items():
        kind = tuple if rows[key].is_repeatable else rows[key].type
        if not _is_a(value, kind):
            raise UsageError(f"{file.path}: launcher.{key}: must be {KINDS.get(kind, 'a text')}")
    return {rows[key].field: value for key, value in file.launcher.items() if key != HOSTS}


def work_words(file: SettingsFile, rest: Sequence[str]) -> list[str]:
    """Return task or command, and the task's options: what was typed wins over the file."""
    if rest and not find_task(rest[0]):  # a program takes nothing of the file
        return list(rest)
    if not rest and file.command:
        return ["--", *file.command]
    if not rest and len(file.tasks) > 1:
        names = " and ".join(file.tasks)
        raise UsageError(f"{file.path} has {names}: type which of them")
    name = rest[0] if rest else next(iter(file.tasks), "")
    if not name:
        return []
    typed = typed_options(rest[1:])
    left = {key: value for key, value in file.tasks.get(name, {}).items() if key not in typed}
    return [name, *words_of(left), *rest[1:]]


def typed_options(args: Sequence[str]) -> set[str]:
    """Return the options among arguments, without dashes: `--no-flip` speaks of `flip`."""
    typed = (arg.partition("=")[0] for arg in args if arg[:2] == "--")
    names = {name.removeprefix("--").replace("_", "-") for name in typed}
    return names | {name.removeprefix("no-") for name in names}


def with_place(error: UsageError, file: SettingsFile, typed: Collection[str]) -> UsageError:
    """Return an error about an option with file and key, if it is from there and was not typed."""
    match = re.match(r"--(?:no-)?([\w-]+)", str(error))
    key = match[1].replace("_", "-") if match else ""
    if key and key not in typed:
        for table, content in {"launcher": file.launcher, **file.tasks}.items():
            if key in content:
                return UsageError(f"{file.path}: {table}.{key}: {error}")
    return error


def words_of(table: Table) -> Iterator[str]:
    """Yield a table as options of a task."""
    for key, value in table.items():
        if isinstance(value, bool):
            yield f"--{key}" if value else f"--no-{key}"
        elif isinstance(value, list):
            yield from (f"--{key}", *map(str, value))
        else:
            yield f"--{key}={value}"


def settings_text(command_name: str, settings: Options, work: Work) -> str:
    """Return a launch as a settings file; of --secret it has the names only."""
    launcher: dict[str, Any] = {}
    for option in options(type(settings)):
        value = reduce(getattr, option.whole, settings)
        if value != option.default and option.field not in NOT_KEPT:
            launcher[option.key] = str(value) if isinstance(value, Path) else value
    if hasattr(settings, HOSTS) and not {"host-list", "slurm"} & launcher.keys():
        launcher[HOSTS] = str(getattr(settings, HOSTS))
    keys: dict[str, Any] = {"launch": command_name}
    tables: dict[str, Mapping[str, Any]] = {"launcher": launcher}
    if isinstance(work, TaskWork):
        tables[work.task] = options_of(work.options)
    elif isinstance(work, Command):
        keys["command"] = work.args
    return HEAD + toml_of(keys, tables)


def options_of(args: tuple[str, ...]) -> dict[str, Any]:
    """Return options as a table, the other way round; numbers are numbers where that is the same.

    An option without a value is a switch: no option of a task takes a value that begins with two
    dashes.
    """
    typed: dict[str, Any] = {}
    key = ""
    for arg in args:
        if arg.startswith("--"):
            key, equals, value = arg.removeprefix("--").partition("=")
            typed[key] = [value] if equals else []
        elif key:
            typed[key].append(arg)
    table: dict[str, Any] = {}
    for key, values in typed.items():
        if values:
            table[key] = _value(values)
        else:
            table[key.removeprefix("no-")] = not key.startswith("no-")
    return table


def _value(values: list[str]) -> Any:
    if len(values) > 1:
        return values
    for kind in (int, float):
        try:
            if str(kind(values[0])) == values[0] and values[0] not in ("inf", "-inf", "nan"):
                return kind(values[0])
        except ValueError:
            continue
    return values[0]


def toml_of(keys: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return keys, and tables of keys, as a TOML document."""
    named = (f"[{_toml_key(name)}]\n{_lines_of(table)}" for name, table in tables.items())
    return "\n".join(filter(None, (_lines_of(keys), *named)))


def _lines_of(table: Mapping[str, Any]) -> str:
    return "".join(f"{_toml_key(key)} = {_toml_value(value)}\n" for key, value in table.items())


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    # TOML takes values as JSON has them, but for one character that it wants escaped, too
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return text.encode("utf-8", "replace").decode()  # without surrogates of odd file names
