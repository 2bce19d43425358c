"""Find tasks: those of the table, those of installed packages, and the user's own.

    catdog                 a line of the table in rackrun/contract/tasks.py
    flowers                the name of an entry point in the group `rackrun.tasks`
    my_package.my_task     a module, or a package, in the current folder or installed
    ./my_task.py           a file

A module or file is a task if it defines `TASK` and `RECIPES`; a package may have them in `model.py`
and `recipes.py`. Sources are only parsed here; ranks import them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from rackrun.contract.tasks import TASKS, package_of
from rackrun.user_code.sources import parsed, spec_of

GROUP = "rackrun.tasks"
OWN_TASK = "./my_task.py"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class TaskSource:
    """Where the code of a task is."""

    name: str
    """The task as typed."""
    recipes: str
    """The module with `RECIPES`."""
    model: str
    """The module with `TASK`."""
    commands: tuple[str, ...] = ()
    """Its own commands, each a module beside `model` with a `main(args)`."""
    file: Path | None = None
    """The file with its `TASK`; None for a task of the table."""


def find_task(name: str) -> TaskSource | None:
    """Return the task of this name, import path or file; None if there is none.

    Raises UsageError for a file that is not Python.
    """
    if name in TASKS:
        package = package_of(name)
        return TaskSource(name, f"{package}.recipes", f"{package}.model", TASKS[name])
    if name.endswith(".py"):
        file = Path(name)
        is_task = file.stem.isidentifier() and file.is_file() and _defines_task(file)
        return TaskSource(name, file.stem, file.stem, file=file) if is_task else None
    if not _MODULE.fullmatch(name):
        return None
    source = _in_module(name)
    if source is None and (module := _announced().get(name)):
        source = _in_module(module)
    return replace(source, name=name) if source else None


def known_tasks() -> Sequence[str]:
    """Return the tasks with a name: those of the table, and entry points of installed packages."""
    return [*TASKS, *sorted(_announced().keys() - TASKS.keys())]


def why_no_task(name: str) -> str:
    """Return the message for an unknown task, with the one that was probably meant."""
    if name.endswith(".py"):
        return _why_no_file(Path(name))
    if close := get_close_matches(name, known_tasks(), n=1):
        return f"no task {name!r}; did you mean {close[0]}?"
    if "." in name and _MODULE.fullmatch(name):
        spec = spec_of(name)
        where = f"in {Path.cwd()} or installed"
        why = f"{spec.origin or name} does not define TASK" if spec else f"no such module {where}"
        return f"no task {name!r}: {why}"
    return f"no task {name!r}; there are: {', '.join(known_tasks())}, or your own: {OWN_TASK}"


def _why_no_file(file: Path) -> str:
    if not file.is_file():
        close = get_close_matches(file.name, [one.name for one in file.parent.glob("*.py")], n=1)
        meant = f"; did you mean {file.parent / close[0]}?" if close else ""
        return f"no file {file}{meant}"
    if not file.stem.isidentifier():
        return f"{file} is not a task: its name cannot be imported; type: mv {file} my_task.py"
    return f"{file} is not a task: it does not define TASK"


@cache
def _announced() -> dict[str, str]:
    """Return the tasks that are entry points of installed packages, and the module of each."""
    if not any(map(_may_announce, sys.path)):
        return {}
    from importlib.metadata import entry_points

    return {entry.name: entry.module for entry in entry_points(group=GROUP)}


def _may_announce(folder: str) -> bool:
    """Return True if a package in a folder may have entry points for tasks.

    Python's own look-up takes a tenth of a second, for nothing where there is no such package.
    """
    for file in Path(folder).glob("*-info/entry_points.txt"):
        try:
            if GROUP.encode() in file.read_bytes():
                return True
        except OSError:
            return True
    return False


def _in_module(module: str) -> TaskSource | None:
    spec = spec_of(module)
    for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
        if (folder / "model.py").is_file() and (folder / "recipes.py").is_file():
            recipes, model = f"{module}.recipes", f"{module}.model"
            return TaskSource(module, recipes, model, file=folder / "model.py")
    file = Path((spec and spec.origin) or "")
    is_task = file.suffix == ".py" and _defines_task(file)
    return TaskSource(module, module, module, file=file) if is_task else None


def _defines_task(file: Path) -> bool:
    """Return True if a source defines TASK at its top level; raise UsageError if not Python."""
    import ast

    names: set[str] = set()
    for one in parsed(file).body:
        targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(one, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in one.names}
    return "TASK" in names
