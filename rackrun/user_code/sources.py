"""Find and parse the user's code without importing it.

Only ranks import it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from rackrun.errors import UsageError
from rackrun.user_code.imports import how_to_type, is_import_path, why_not_callable

_AT_RUN_TIME = {"*", "__getattr__", "exec", "globals", "setattr", "vars"}
"""Functions that define names at run time, which the source of a module does not show."""


def spec_of(module: str) -> ModuleSpec | None:
    """Return where a module is, in the current folder or installed; no package is imported."""
    spec, search_path = None, [str(Path.cwd()), *sys.path]
    for number, name in enumerate(module.split(".")):
        spec = PathFinder.find_spec(name, search_path)
        if spec is None and not number:  # an editable installation has a finder of its own
            spec = None if name in sys.modules else find_spec(name)
        if spec is None:
            return None
        search_path = list(spec.submodule_search_locations or ())
    return spec


def did_you_mean(name: str, names: Collection[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean X?` for a mistyped name, one of those known or of the user's code.

    A name with its prefix left out, as `vit` of `timm:vit`, is that name; `my.Net` is `my:Net`.
    """
    module, _, member = name.rpartition(".")
    if module and spec_of(module):
        return f"; did you mean {module}:{member}?"
    prefixed = [each for each in names if each.partition(":")[2] == name.partition(".")[0]]
    close = [f"{each.partition(':')[0]}:{name}" for each in prefixed if ":" in each]
    close = close or get_close_matches(name, names, n=5, cutoff=cutoff)
    return f"; did you mean {', '.join(close)}?" if close else ""


def nearest(name: str, names: Collection[str]) -> str:
    """Return what to type instead of an unknown name: likely ones, or all when there are few."""
    close = get_close_matches(name, names, n=5, cutoff=0.5)
    if close:
        return f"did you mean {', '.join(close)}?"
    if len(names) == 1:
        return f"there is only {', '.join(names)}"
    return f"there are {', '.join(names)}" if len(names) < 20 else f"there are {len(names)}"


def source_of(module: str) -> Path | None:
    """Return the source of a module in the current folder or installed; it is not imported."""
    spec = spec_of(module)
    return Path(spec.origin) if spec and spec.origin else None


def parsed(file: Path) -> ast.Module:
    """Return the syntax tree of a source; raise UsageError, with the line, if it is not Python."""
    try:
        return ast.parse(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise UsageError(f"{file}, line {line}: {getattr(error, 'msg', error)}") from None


def refuse_absent(option: str, name: str, example: str, *arguments: str) -> None:
    """Raise UsageError for an import path that names nothing, as far as sources here show.

    Likewise for what cannot be called with these arguments. A module that is not installed here may
    be installed on hosts, and a name may be defined during the import: the ranks check both. The
    arguments are those of `imported`.
    """
    hint = how_to_type(example)
    if not is_import_path(name):
        raise UsageError(f"{option} {name}: {hint}")
    module, _, path = name.partition(":")
    where = f"{option} {name}"
    spec = spec_of(module)
    if spec is None:
        if meant := _module_meant(module):
            missing = f"no module {module} in {Path.cwd()} or installed"
            raise UsageError(f"{where}: {missing}; did you mean {meant}:{path}?")
        return
    first = path.partition(".")[0]
    if not spec.origin or not spec.origin.endswith(".py") or spec_of(f"{module}.{first}"):
        return
    syntax = parsed(Path(spec.origin))
    if first not in (names := _names_in(syntax)) and not names & _AT_RUN_TIME:
        close = get_close_matches(first, _defined_at_the_top(syntax), n=1)
        what = f"did you mean {module}:{close[0]}?" if close else hint
        raise UsageError(f"{where}: no class or function {path} in {module}; {what}")
    if path == first and not _may_be_called(syntax, path, arguments):
        raise UsageError(f"{where}: {why_not_callable(path, arguments)}")


def _may_be_called(module: ast.Module, name: str, arguments: Collection[str]) -> bool:
    """Return whether a name may be called with these keyword arguments, as far as its source shows.

    Decorators, base classes and a second definition can change that.
    """
    definitions = [top for top in ast.walk(module) if getattr(top, "name", "") == name]
    definition = definitions[0] if len(definitions) == 1 else None
    if definition not in module.body:
        return True
    if isinstance(definition, ast.FunctionDef):
        return bool(definition.decorator_list) or _takes(definition.args, arguments)
    if not isinstance(definition, ast.ClassDef) or definition.decorator_list or definition.keywords:
        return True
    methods = {each.name: each for each in definition.body if isinstance(each, ast.FunctionDef)}
    if "__new__" in methods or "__init__" not in methods:
        return bool(definition.bases) or "__new__" in methods
    return _takes(methods["__init__"].args, arguments, is_method=True)


def _takes(parameters: ast.arguments, arguments: Collection[str], is_method: bool = False) -> bool:
    positional = [*parameters.posonlyargs, *parameters.args]
    required = positional[: len(positional) - len(parameters.defaults)][is_method:]
    keywords = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
    needed = {each.arg for each in (*required, *(key for key, default in keywords if not default))}
    named = {each.arg for each in (*parameters.args, *parameters.kwonlyargs)}
    return needed <= set(arguments) and (parameters.kwarg is not None or named >= set(arguments))


def _module_meant(module: str) -> str:
    """Return a module of the current folder with a similar name; empty if there is none."""
    if (Path.cwd() / module).is_file() and module.endswith(".py"):
        return module.removesuffix(".py")
    if "." in module:
        return ""
    close = get_close_matches(module, [path.stem for path in Path.cwd().glob("*.py")], n=1)
    return close[0] if close else ""


def _defined_at_the_top(module: ast.Module) -> Iterator[str]:
    """Yield the functions and classes of a source, and what it imports from others."""
    for top in module.body:
        if isinstance(top, ast.FunctionDef | ast.ClassDef):
            yield top.name
        elif isinstance(top, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in top.names)


def _names_in(module: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name):
            names.add(node.id)
    return names
