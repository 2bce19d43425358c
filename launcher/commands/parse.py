"""The launcher's command line: options from dataclasses, then what is to run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from launcher.lifecycle.restart_policy import without
from launcher.run.job import Command, Limits, TaskWork, Work, all_data_of
from launcher.run.settings import Options, Serving
from launcher.run.url import check_url
from rackrun import commandline
from rackrun.commands import called
from rackrun.contract import TASKS
from rackrun.errors import UsageError

TYPED_ONLY = {
    "scaling": "launch once for every count instead",
    "detach": "from Python a run stays attached; type: ./run-ssh --detach",
    "check": "type: ./run-ssh --check",
    "dry_run": "type: ./run-local --dry-run, or ./run-ssh --dry-run",
    "json": "a Result is returned",
}
"""Options that mean nothing where a run is started from Python, and what to do instead."""

RENAMED = {
    "--allow": "--ignore-check",
    "--go-on": "--auto-resume",
    "--now": "--force",
    "--nproc-per-node": "--nproc",  # torchrun's word, which stays
    "-H": "--host-list",  # mpirun's
}
"""Other spellings of options: old ones, for one more release, and aliases."""

Settings = TypeVar("Settings")

Door = TypeVar("Door", bound=Options)
"""The options of one way to launch."""


def split(
    args: Sequence[str], settings: type[Options], words: int = 0
) -> tuple[list[str], list[str]]:
    """The launcher's options and its first `words` plain words; and the rest, from the task on."""
    own: list[str] = []
    rest = list(args)
    while rest and rest[0] != "--":
        word = rest[0]
        if not word.startswith("-"):
            if not words:
                break
            words -= 1
        own.append(rest.pop(0))
        name = RENAMED.get(word, word)
        if name.startswith("-") and "=" not in name and rest and name not in flags(settings):
            own.append(rest.pop(0))
    return own, rest


def flags(settings: type[Options]) -> set[str]:
    """Return the options that take no value."""
    return {"-h", "--help", *switches(settings)}


def switches(settings: type[Any]) -> Iterator[str]:
    """The options that take no value."""
    for name, kind in get_type_hints(settings).items():
        if kind is bool:
            yield f"--{name.replace('_', '-')}"
            yield f"--no-{name.replace('_', '-')}"
        elif isinstance(kind, type) and is_dataclass(kind):
            yield from switches(kind)


def parse(settings: type[Settings], name: str, args: Sequence[str], description: str) -> Settings:
    """Return the options of a command as a dataclass; raise UsageError for bad usage. --help exits.

    `{prog}` in the description becomes the command as the user calls it.
    """
    from tyro.conf import FlagCreatePairsOff, UseAppendAction  # not needed where no option is given

    markers = (FlagCreatePairsOff, UseAppendAction)
    prog = called(name)
    about = description.replace("{prog}", prog)
    return commandline.parse(settings, prog, args, about, markers, RENAMED)


def from_names(settings: type[Door], values: Mapping[str, Any]) -> Door:
    """The options from their names in Python; raises UsageError for one that there is not."""
    names = {_as_field(old): _as_field(new) for old, new in RENAMED.items()}
    outer = {names.get(name, name): value for name, value in values.items()}
    for name, instead in TYPED_ONLY.items():
        if outer.get(name):
            raise UsageError(f"{name} is for the command line: {instead}")
    serving, limits = _taken(outer, Serving), _taken(outer, Limits)
    own = _taken(outer, settings)
    if outer:
        raise UsageError(f"launch has no option {min(outer)!r}")
    groups: dict[str, Any] = {"serving": Serving(**serving), "limits": Limits(**limits)}
    return settings(**(groups | own))


def _as_field(option: str) -> str:
    """Return the name of an option as Python has it: `--nproc-per-node` -> `nproc_per_node`."""
    return option.removeprefix("--").replace("-", "_")


def _taken(values: dict[str, Any], group: type[Any]) -> dict[str, Any]:
    """Take the values that belong to a group of options out of all, as its fields have them."""
    kinds = get_type_hints(group)
    names = [field.name for field in fields(group) if field.name in values]
    return {name: _meant(name, kinds[name], values.pop(name)) for name in names}


def _meant(name: str, kind: Any, value: Any) -> Any:
    """A value from Python as a field has it; raises UsageError for what cannot be one."""
    if kind in (Path, str) and isinstance(value, str | os.PathLike):
        return kind(os.fspath(value))
    if kind is float and isinstance(value, int):
        return float(value)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(value)
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    wanted = "a list" if get_origin(kind) is tuple else f"of type {kind.__name__}"
    raise UsageError(f"{name}={value!r}: must be {wanted}")


def work_of(rest: Sequence[str]) -> Work | None:
    """Return the task with its options, the command after `--`, or None."""
    if not rest:
        return None
    if rest[0] == "--":
        if not rest[1:]:
            raise UsageError("nothing behind --; type for example: -- python train.py")
        return Command(tuple(rest[1:]))
    if rest[0] not in TASKS:
        hint = "a command of your own goes behind --"
        raise UsageError(f"no task {rest[0]!r}; there are: {', '.join(TASKS)}; {hint}")
    task = TaskWork(rest[0], tuple(rest[1:]))
    for data in all_data_of(task):
        if "://" in data:
            check_url(data)
    return task


def typed(command: str, own: Sequence[str], work: Work) -> tuple[str, ...]:
    """Return the command that launched a task, without --resume; nothing for other work."""
    if not isinstance(work, TaskWork):
        return ()
    return (*called(command).split(), *own, work.name, *without(work.options, "--resume"))


def is_question(work: Work) -> bool:
    """Return True for help, or for a tool of the task (`predict`): no training."""
    if not isinstance(work, TaskWork) or not work.options:
        return False
    return bool({"-h", "--help"} & set(work.options)) or not work.options[0].startswith("-")
