"""A settings file: the options of the launcher, and a task with its options or a command.

    launch = "ssh"                       # what `rerun` starts: local, ssh, ray or node
    typed = ["rackrun", "ssh", ...]      # the command of a run of a task, for its report
    command = ["python", "train.py"]     # unless a table names a task

    [launcher]
    hosts = "hosts.txt"
    max-restarts = 2

    [imagenet]
    epochs = 90
    lr = 0.5

Keys are options without their dashes. A file that launches of several kinds share has no more than
the tables.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rackrun.errors import UsageError
from rackrun.light_dataclass import dataclass
from rackrun.user_code.tasks import find_task, known_tasks

KEYS = ("launch", "typed", "command", "launcher")
"""The keys besides the names of tasks."""
WAYS = ("local", "ssh", "ray", "node")
KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "a list of texts",
}

Table = Mapping[str, Any]


@dataclass(frozen=True)
class SettingsFile:
    """The content of a settings file; keys have dashes."""

    path: Path
    launch: str
    command: tuple[str, ...]
    launcher: Table
    tasks: Mapping[str, Table]
    """Options by the name of their task."""


def read_settings(path: Path) -> SettingsFile:
    """Return the settings of a file; raise UsageError for a file that has none."""
    import tomllib  # most launches have no such file

    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    named = {key for key in tables if key not in KEYS and find_task(key)}
    others = [key for key in tables if key not in named]
    check_keys(path, "", others, (*KEYS, *known_tasks()))
    launch, command = tables.get("launch", ""), tables.get("command", [])
    if launch and launch not in WAYS:
        raise UsageError(f"{path}: launch: {launch!r}: must be one of {', '.join(WAYS)}")
    if not _is_a(command, tuple) or (command == [] and "command" in tables):
        raise UsageError(f"{path}: command: must be a list of texts")
    tables = {
        name: _table(path, name, tables[name]) for name in tables if name in {"launcher", *named}
    }
    return SettingsFile(path, launch, tuple(command), tables.pop("launcher", {}), tables)


def check_keys(path: Path, table: str, keys: Collection[str], valid: Collection[str]) -> None:
    """Raise UsageError for a key that is not known, with one that may have been meant."""
    for key in keys:
        if key not in valid:
            close = difflib.get_close_matches(key, valid, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"{path}: {key_location(table, key)}: no such key{meant}")


def check_kind(path: Path, key: str, value: object, kind: type) -> None:
    """Raise UsageError for a value of another kind than the option `key` of the launcher has."""
    if not _is_a(value, kind):
        raise UsageError(
            f"{path}: {key_location('launcher', key)}: must be {KINDS.get(kind, 'a text')}"
        )


def key_location(table: str, key: str) -> str:
    """Return a key as messages name it: table.key."""
    return f"{table}.{key}" if table else key


def words_of(options: Table, repeat: bool = False) -> Iterator[str]:
    """Yield a table as options; `repeat` those of lists: `--env A --env B`, not `--env A B`."""
    for key, value in options.items():
        if value is True:
            yield f"--{key}"
        elif value is False:
            yield f"--no-{key}"
        elif isinstance(value, list) and repeat:
            yield from (f"--{key}={item}" for item in value)
        elif isinstance(value, list):
            yield from (f"--{key}", *map(str, value))
        else:
            yield f"--{key}={value}"


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
    return dict((key, _value(values)) if values else _switch(key) for key, values in typed.items())


def _switch(key: str) -> tuple[str, bool]:
    return (key.removeprefix("no-"), False) if key.startswith("no-") else (key, True)


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


def _table(path: Path, name: str, content: object) -> Table:
    if not isinstance(content, dict):
        raise UsageError(f"{path}: {name}: must be a table: [{name}]")
    for key, value in content.items():
        if isinstance(value, list) and not _is_a(value, tuple) or not _is_plain(value):
            raise UsageError(
                f"{path}: {key_location(name, key)}: must be one value or a list of texts"
            )
    return {key.replace("_", "-"): value for key, value in content.items()}


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | list)


def _is_a(value: object, kind: type) -> bool:
    if kind is tuple:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind if kind in KINDS else str)


def toml_of(keys: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return keys, and tables of keys, as a TOML document."""
    blocks = [
        _lines_of(keys),
        *(f"[{_toml_key(name)}]\n{_lines_of(table)}" for name, table in tables.items()),
    ]
    return "\n".join(block for block in blocks if block)


def _lines_of(keys: Mapping[str, Any]) -> str:
    return "".join(f"{_toml_key(key)} = {_toml_value(value)}\n" for key, value in keys.items())


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_text(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return _toml_text(str(value))


def _toml_text(text: str) -> str:
    """Return a basic string: JSON's escapes are TOML's, which has one more character to escape."""
    whole = text.encode("utf-8", "replace").decode()
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")
