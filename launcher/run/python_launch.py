"""`rackrun.launch`: the function that it is given to call, and what it returns."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, get_type_hints

from rackrun.contract.files import MOST_RETURNED, RETURNED
from rackrun.errors import Problem, UsageError
from rackrun.launcher.run.job import CALL, FunctionCall
from rackrun.launcher.run.result import Result
from rackrun.run_folder import RunFolder
from rackrun.shapes import Misshapen, parsed_file
from rackrun.user_code.imports import is_import_path

MOST_ARGUMENTS = 100_000
"""Bytes; the kernel passes no more than 131,072 in a word."""


@dataclass(frozen=True)
class LaunchResult(Result):
    """Result of `launch` in Python."""

    returned: Mapping[int, Any] = field(default_factory=dict)
    """What the function that was launched returned on each rank; of other work nothing."""


def function_call(args: Sequence[object]) -> FunctionCall | None:
    """Return the call that the arguments of `launch` mean: a function, or its MODULE:FUNCTION.

    None where they are a task or a command; UsageError for a function that ranks cannot import.
    """
    target, *arguments = args or [""]
    if callable(target):
        name = _import_path(target)
    elif isinstance(target, str) and is_import_path(target):
        name = target
    else:
        return None
    try:
        text = json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"launch of {name}: its arguments are passed as JSON: {error}") from None
    if len(text) > MOST_ARGUMENTS:
        what = f"{len(text):,} bytes of arguments, of which {MOST_ARGUMENTS:,} may travel"
        raise UsageError(f"launch of {name}: {what}; pass the path of a file")
    return FunctionCall((*CALL, name, text))


def with_returned(result: Result, function: object) -> LaunchResult:
    """Return a result with what the function that was launched returned on each rank.

    The return annotation of the function is the shape of that; raises Problem for anything else.
    """
    shape = get_type_hints(function).get("return", Any) if callable(function) else Any
    returned = {}
    for rank, code in result.codes.items():
        path = RunFolder(result.folder).returned / f"rank-{rank}.json"
        try:
            if code == 0 and path.is_file():
                returned[rank] = parsed_file(path, shape, MOST_RETURNED)
        except Misshapen as error:
            raise Problem(f"{path}: not what {function} says it returns: {error}") from None
    if result.exit_code == 0 and (missing := result.codes.keys() - returned):
        where = f"what rank {min(missing)} returned has not come back"
        raise Problem(
            f"{result.folder}: {where}; it is on its host, in {RETURNED} of its run folder"
        )
    return LaunchResult(**vars(result), returned=returned)


def _import_path(function: Any) -> str:
    """Return the import path of a function; UsageError for one that no other process can import."""
    module = getattr(function, "__module__", "") or ""
    path = getattr(function, "__qualname__", "") or repr(function)
    importable = reduce(
        lambda parent, name: getattr(parent, name, None), path.split("."), sys.modules.get(module)
    )
    if module == "__main__" or importable is not function:
        raise UsageError(
            f"launch of {path}: ranks cannot import it from {module or 'nowhere'}; put it"
            " at the top of a module beside this file, and import it from there"
        )
    return f"{module}:{path}"
