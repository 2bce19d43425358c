"""Import the user's code by its import path, MODULE:NAME; report its errors in a line each."""

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from rackrun.commandline.program import missing_package, user_packages
from rackrun.errors import Problem, UsageError

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*(\.\w+)*")


def is_import_path(name: str) -> bool:
    """Return whether a name has the form MODULE:NAME."""
    return bool(_IMPORT_PATH.fullmatch(name))


def how_to_type(example: str) -> str:
    """Return what to type for an import path; `example` is an example of a name."""
    return f"type MODULE:NAME, as my_module:{example} for {example} in my_module.py of this folder"


def imported(option: str, name: str, example: str, *arguments: str) -> Callable[..., Any]:
    """Return the class or function that an option names, in the current folder or installed.

    Raises UsageError if it cannot be called with these keyword arguments; `example` is an example
    of a name.
    """
    hint = how_to_type(example)
    if not is_import_path(name):
        raise UsageError(f"{option} {name}: {hint}")
    module, _, path = name.partition(":")
    import_from(Path.cwd())
    target: object = own_module(f"{option} {name}", module, hint)
    for part in path.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        raise UsageError(f"{option} {name}: no class or function {path} in {module}; {hint}")
    try:
        if arguments:
            inspect.signature(target).bind(**dict.fromkeys(arguments))
    except (TypeError, ValueError):
        raise UsageError(f"{option} {name}: {why_not_callable(path, arguments)}") from None
    return target


def why_not_callable(path: str, arguments: Collection[str]) -> str:
    """Return that a class or function cannot be called with these arguments, and what to type."""
    form = f"def {path.rpartition('.')[2]}({', '.join(arguments)}): ..."
    return f"cannot be called with {' and '.join(arguments)}; type: {form}"


def import_from(folder: Path) -> None:
    """Put a folder before all others for imports, here and in processes that this one starts."""
    if str(folder) in sys.path[:1]:
        return
    sys.path.insert(0, str(folder))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))


def own_module(where: str, name: str, hint: str = "") -> ModuleType:
    """Import a module of the user; report an error in it as a line with its place, after `where`.

    A module that is not installed here may be installed on hosts, so that is not a usage error.
    """
    user_packages.add(name.partition(".")[0])
    try:
        return import_module(name)
    except Problem:
        raise
    except Exception as error:  # of the user's module: it may be any
        if isinstance(error, ModuleNotFoundError):
            if missing_package(error):
                raise
            if f"{name}.".startswith(f"{error.name}."):
                missing = f"no module {error.name} in {Path.cwd()} or installed"
                raise UsageError(f"{where}: {missing}{f'; {hint}' if hint else ''}") from None
        frames = traceback.extract_tb(error.__traceback__)
        last = [frame for frame in frames if not frame.filename.startswith("<frozen")][-1]
        what = f"{last.filename}, line {last.lineno}: {type(error).__name__}: {error}"
        kind = Problem if isinstance(error, ModuleNotFoundError) else UsageError
        raise kind(f"{where}: {what}") from None
