"""The options of a settings class, as its source describes them.

A class with several bases has one group of options per base, each under the first line of the
docstring of the class that declares them. Sources are parsed and options not evaluated, because
importing the parser takes longer than a page of help may take.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

Source = Mapping[str, tuple[ast.expr, str]]
"""Field -> its annotation, and the text below it."""

VALUES: Mapping[type, str] = MappingProxyType({int: "N", float: "X", bool: ""})
"""Placeholder of a value in the help; for all others, TEXT or PATH."""


class Values(NamedTuple):
    """Mark of an option: its placeholder, in `Annotated[str, Values("{sgd,adamw}")]`."""

    shown: str


class Hidden:
    """Mark of an option that users do not type: `Annotated[str, Hidden]`."""


class Option(NamedTuple):
    """A row of the help."""

    name: str
    """As it is typed: --epochs; HOSTS for a word without a name."""
    values: str
    default: str
    """In words; empty if there is none."""
    text: str


@dataclass
class OptionGroup:
    """Options under a heading."""

    heading: str
    options: list[Option] = field(default_factory=list)


def groups(
    settings: type[Any], own: type[Any] | None = None, heading: str = ""
) -> list[OptionGroup]:
    """Return the options of a settings class in groups, the most general first.

    Options declared by subclasses of `own` come last, under `heading`.
    """
    found: dict[str, OptionGroup] = {}
    nested: list[OptionGroup] = []
    left = {field.name for field in fields(settings)}
    for part in reversed(settings.__mro__):
        below = own is not None and issubclass(part, own) and part is not own
        title = heading if below else _first_sentence(part)
        for name in [name for name in written(part) if name in left]:
            left.remove(name)
            default = default_of(settings, name)
            if is_dataclass(default):
                nested += groups(type(default))
            elif option := _option(settings, name, default):
                found.setdefault(title, OptionGroup(title)).options.append(option)
    return [*found.values(), *nested]


def _first_sentence(settings: type[Any]) -> str:
    """Return the first line of a class's docstring, without its full stop."""
    lines = (settings.__doc__ or "").strip().splitlines()
    return lines[0].rstrip(".") if lines else ""


def _option(settings: type[Any], name: str, default: object) -> Option | None:
    (kind,) = (field.type for field in fields(settings) if field.name == name)
    marks = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    text = next((text for text in texts(settings, name) if text), "")
    if Hidden in marks or not text:
        return None
    typed = f"--{name.replace('_', '-')}"
    if default is True:
        typed = f"{typed}, --no-{typed[2:]}"
    is_word = isinstance(kind, str) and kind.startswith("Positional")
    values = "" if is_word else _values(kind, marks, default)
    return Option(name.upper() if is_word else typed, values, _shown(default), text)


def _values(kind: object, marks: tuple[object, ...], default: object) -> str:
    """Return the placeholder of an option's value."""
    for mark in marks:
        if isinstance(mark, Values):
            return mark.shown
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, get_args(kind)))}}}"
    return VALUES.get(type(default), "PATH" if isinstance(default, Path) else "TEXT")


def _shown(default: object) -> str:
    """Return a default in words; empty for a switch that is off."""
    if isinstance(default, bool):
        return "on" if default else ""
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default in ("", (), None) or default is MISSING else str(default)


def default_of(settings: type[Any], name: str) -> object:
    """Return the default of a field, MISSING without one."""
    (found,) = (field for field in fields(settings) if field.name == name)
    return found.default if found.default_factory is MISSING else found.default_factory()


def texts(settings: type[Any], name: str) -> Iterator[str]:
    """Yield the texts that a class and those above it give a field."""
    for above in settings.__mro__[:-1]:
        if name in (fields_there := written(above)):
            yield fields_there[name][1]


def written(settings: type[Any]) -> Source:
    """Return the fields that a class itself declares, read from its source."""
    if settings.__module__ == "builtins":
        return {}
    module = sys.modules.get(settings.__module__)
    return _classes(getattr(module, "__file__", None) or "").get(settings.__name__, {})


@cache
def _classes(file: str) -> Mapping[str, Source]:
    """Return the fields of the classes of a source; of no classes where there is no source."""
    if not file.endswith(".py"):
        return {}
    body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    return {node.name: _fields(node) for node in body if isinstance(node, ast.ClassDef)}


def _fields(node: ast.ClassDef) -> Source:
    found = {}
    for line, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            if ast.unparse(line.annotation).startswith("ClassVar"):
                continue  # no field
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = str(after.value.value) if is_text else ""  # type: ignore[union-attr]
            found[line.target.id] = (line.annotation, text)
    return found
