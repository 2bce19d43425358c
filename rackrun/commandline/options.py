"""The table of a command's options: one row for each field of its settings class.

The parser, the help, completion, settings files, the arguments of `launch` and the page of options
come of these rows, so that an option exists once: as a field with a type, a default, and a text
below it. A class with several bases has one group of options per base, under the first line of
the docstring of the class that declares them; a field that is itself a dataclass adds the options
of that class.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

T = TypeVar("T")

Examples = tuple[tuple[str, str], ...]
"""Commands, `{prog}` among their words, and what they do: a ClassVar `examples` of settings."""

HELP = frozenset({"-h", "--help"})
"""What every command answers with the page of rackrun.commandline.help_page."""


class _Mark(NamedTuple):
    name: str


_POSITIONAL: Final = _Mark("positional")
Hidden: Final = _Mark("hidden")
"""Mark of an option that users do not type: `Annotated[str, Hidden]`."""

Positional = Annotated[T, _POSITIONAL]
"""A field that is typed without a name: `hosts: Positional[Path]`."""

PLACEHOLDERS: Mapping[Any, str] = types.MappingProxyType(
    {int: "N", float: "X", bool: "", Path: "PATH", str: "TEXT"}
)
"""What stands for a value in the help."""


class Values(NamedTuple):
    """Mark of an option: its placeholder, in `Annotated[str, Values("{sgd,adamw}")]`."""

    placeholder: str


class Option(NamedTuple):
    """An option of a command."""

    settings: type[Any]
    """The class that has the field, itself or from a base."""
    field: str
    type: Any
    """The type of one value: bool, int, float, str, Path or a Literal."""
    default: Any
    """MISSING if the option must be typed."""
    path: tuple[str, ...] = ()
    """Fields that lead to the class, if it is that of a field: ("serving",)."""
    is_positional: bool = False
    is_repeatable: bool = False
    """Whether the field is a tuple."""
    is_hidden: bool = False
    placeholder: str = ""

    @property
    def name(self) -> str:
        """The option as it is typed, or the name of a positional argument: --batch-size, HOSTS."""
        return self.key.upper() if self.is_positional else f"--{self.key}"

    @property
    def whole(self) -> tuple[str, ...]:
        """The fields that lead from the settings class to the value."""
        return (*self.path, self.field)

    @property
    def key(self) -> str:
        """The option in a settings file: batch-size."""
        return self.field.replace("_", "-")

    @property
    def is_required(self) -> bool:
        """Whether the command cannot do without it; a tuple can be empty."""
        return self.default is MISSING and not self.is_repeatable

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.type is bool

    @property
    def has_negation(self) -> bool:
        """Whether --no-NAME has a use: a switch that is on by default, or by circumstances."""
        return self.is_switch and self.default is not False

    @property
    def choices(self) -> tuple[str, ...]:
        """The possible values; none if there is no list of them."""
        return tuple(map(str, get_args(self.type))) if get_origin(self.type) is Literal else ()

    @property
    def default_text(self) -> str:
        """The default in words; empty for a switch that is off, and where there is none."""
        if isinstance(self.default, bool):
            return "on" if self.default else ""
        if isinstance(self.default, float):
            return f"{self.default:g}"
        is_empty = self.default is MISSING or self.default in ("", (), None)
        return "" if is_empty else str(self.default)

    @property
    def help(self) -> str:
        """The text below the field, in the class or the nearest base that has one."""
        texts = (_texts(base).get(self.field, "") for base in self.settings.__mro__[:-1])
        return " ".join(next(filter(None, texts), "").split())

    @property
    def declared_by(self) -> type[Any]:
        """The most general class that has the field."""
        bases = [base for base in self.settings.__mro__ if self.field in _annotations(base)]
        return bases[-1]


def options(
    settings: type[Any], path: tuple[str, ...] = (), defaults: object = None
) -> list[Option]:
    """Return the options of a settings class, those of dataclasses among its fields included.

    `path` are the fields that lead to the class, and `defaults` what they hold by default: a
    command may give the options of a class that it shares with others defaults of its own.
    """
    rows: list[Option] = []
    types_of_fields = get_type_hints(settings, include_extras=True)
    for field in fields(settings):
        hint = types_of_fields[field.name]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        default = getattr(defaults, field.name, default)
        if isinstance(hint, type) and is_dataclass(hint):
            rows += options(hint, (*path, field.name), default)
        else:
            rows.append(_option(settings, field.name, hint, default, path))
    return rows


def _option(
    settings: type[Any], name: str, hint: Any, default: Any, path: tuple[str, ...]
) -> Option:
    marks: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *marked = get_args(hint)
        marks = tuple(marked)
    if get_origin(hint) in (Union, types.UnionType):  # int | None: None is the default only
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    is_repeatable = get_origin(hint) is tuple
    if is_repeatable:
        hint = get_args(hint)[0]
    choices = f"{{{','.join(map(str, get_args(hint)))}}}" if get_origin(hint) is Literal else ""
    placeholder = next((mark.placeholder for mark in marks if isinstance(mark, Values)), choices)
    return Option(
        settings,
        name,
        hint,
        default,
        path,
        is_positional=_POSITIONAL in marks,
        is_repeatable=is_repeatable,
        is_hidden=Hidden in marks,
        placeholder=placeholder or PLACEHOLDERS.get(hint, "TEXT"),
    )


def groups(
    settings: type[Any], base: type[Any] | None = None, heading: str = "Options"
) -> dict[str, list[Option]]:
    """Return the options that the help shows, by heading: arguments first, then the most general.

    Those that subclasses of `base` declare, or without one the class itself, come under `heading`.
    """
    grouped: dict[str, list[Option]] = {}
    rows = [row for row in options(settings) if row.help and not row.is_hidden]
    for row in sorted(rows, key=lambda row: len(row.path)):
        owner = row.declared_by
        is_below = owner is not base and issubclass(owner, base) if base else owner is settings
        title = (owner.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        grouped.setdefault(heading if is_below else title, []).append(row)
    without = {name: not any(row.is_positional for row in each) for name, each in grouped.items()}
    return {name: grouped[name] for name in sorted(grouped, key=without.__getitem__)}


def declared(settings: type[Any]) -> list[Option]:
    """Return the options that the class itself declares or gives other defaults."""
    own = _annotations(settings)
    rows = (row for row in options(settings) if not row.path and row.field in own)
    return [row for row in rows if row.help and not row.is_hidden]


def _annotations(settings: type[Any]) -> Mapping[str, Any]:
    annotations: Mapping[str, Any] = vars(settings).get("__annotations__", {})
    return annotations


def _texts(settings: type[Any]) -> Mapping[str, str]:
    """Return the texts below the fields that a class itself declares, read from its source."""
    module = sys.modules.get(settings.__module__)
    file = getattr(module, "__file__", None) or ""
    return _texts_of_classes(file).get(settings.__name__, {}) if file.endswith(".py") else {}


@cache
def _texts_of_classes(file: str) -> Mapping[str, Mapping[str, str]]:
    body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    return {node.name: dict(_texts_below(node)) for node in body if isinstance(node, ast.ClassDef)}


def _texts_below(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for line, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            match below:
                case ast.Expr(ast.Constant(str() as text)):
                    yield line.target.id, text
