"""Data from another machine or account, held against a declared shape before anyone uses it.

A frame of an agent, a file on a host, an index on a server: none of it is trusted. `parsed` turns
bytes into JSON within limits; `shaped` turns the result into what a type says, or raises
`Misshapen`, whose message names the place. Shapes are ordinary annotations:

    @dataclass(frozen=True)
    class Rank:
        local: Annotated[int, Between(0, 4095)]
        code: int | None = None                       # has a default, so it may be missing
        name: Annotated[str, Matches(r"[a-z]{1,63}")] = ""
        hosts: Annotated[tuple[str, ...], AtMost(1024)] = ()

    shaped({"local": 3}, Rank)  ->  Rank(local=3, code=None, name="", hosts=())

Without a limit of their own, numbers stay within 2**53 and are finite, text within 64 KiB, and
collections within 65,536 items. Unknown fields are refused. Standard library only: controllers
of detached runs import this on hosts where nothing is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

LARGEST_NUMBER = 2**53  # what JSON's numbers hold exactly everywhere
LONGEST_TEXT = 1 << 16
MOST_ITEMS = 1 << 16

T = TypeVar("T")


class Misshapen(ValueError):
    """Data that is not what its declared shape says; the message names the place and the rule."""


@dataclass(frozen=True)
class Between:
    """Numbers from `least` to `most`, both included."""

    least: float
    most: float

    def check(self, value: Any, where: str) -> None:
        """Raise Misshapen for a number outside."""
        if not self.least <= value <= self.most:
            raise Misshapen(f"{where}: not between {self.least} and {self.most}")


@dataclass(frozen=True)
class AtMost:
    """Text of at most so many characters, or a collection of at most so many items."""

    limit: int


@dataclass(frozen=True)
class Matches:
    """Text that the regular expression matches as a whole."""

    pattern: str

    def check(self, value: Any, where: str) -> None:
        """Raise Misshapen for other text."""
        if not re.fullmatch(self.pattern, value):
            raise Misshapen(f"{where}: not of the expected form")


def parsed(data: bytes | str, shape: type[T], most_bytes: int) -> T:
    """Return JSON as `shape` says; raise Misshapen for anything else, also for bytes beyond."""
    found: T = shaped(parsed_json(data, most_bytes), shape)
    return found


def parsed_json(data: bytes | str, most_bytes: int) -> Any:
    """Return the value of a JSON text; raise Misshapen for what is none, too long, or too deep."""
    if len(data) > most_bytes:
        raise Misshapen(f"longer than {most_bytes} bytes")
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise Misshapen("nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, an integer of thousands of digits
        raise Misshapen(f"no JSON: {str(error)[:100]}") from None


def shaped(value: object, shape: Any, where: str = "it", most: int | None = None) -> Any:
    """Return `value` as `shape` says, lists as tuples and dataclasses built, or raise Misshapen.

    `most`: the longest text or collection, where the default limits are not meant.
    """
    origin = get_origin(shape)
    if origin is Annotated:
        return _annotated(value, shape, where)
    if dataclasses.is_dataclass(shape):
        return _built(value, shape, where)
    if origin in (Union, types.UnionType):
        return _one_of(value, get_args(shape), where)
    if origin is Literal:
        return _literal(value, get_args(shape), where)
    if origin in (tuple, list):
        return _items(value, shape, where, MOST_ITEMS if most is None else most)
    if origin is dict:
        return _mapping(value, shape, where, MOST_ITEMS if most is None else most)
    return _plain(value, shape, where, LONGEST_TEXT if most is None else most)


def _annotated(value: object, shape: Any, where: str) -> Any:
    inner, *rules = get_args(shape)
    limits = [rule.limit for rule in rules if isinstance(rule, AtMost)]
    found = shaped(value, inner, where, *limits)
    for rule in rules:
        if isinstance(rule, (Between, Matches)):  # others may annotate for purposes of their own
            rule.check(found, where)
    return found


def _built(value: object, shape: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise Misshapen(f"{where}: not an object")
    hints, needed = _fields(shape)
    unknown = [name for name in value if name not in hints]
    if unknown:
        raise Misshapen(f"{where}: unknown field {str(unknown[0])[:40]!r}")
    missing = [name for name in needed if name not in value]
    if missing:
        raise Misshapen(f"{where}: no field {missing[0]!r}")
    given = {name: shaped(item, hints[name], f"{where}.{name}") for name, item in value.items()}
    return shape(**given)


@functools.cache
def _fields(shape: type) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the annotations of a dataclass's fields, and the names of those without a default."""
    hints = get_type_hints(shape, include_extras=True)
    fields = [field for field in dataclasses.fields(shape) if field.init]
    missing = dataclasses.MISSING
    needed = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    return {field.name: hints[field.name] for field in fields}, tuple(needed)


def _one_of(value: object, shapes: tuple[Any, ...], where: str) -> Any:
    complaint = Misshapen(f"{where}: of the wrong type")
    for shape in shapes:
        try:
            return shaped(value, shape, where)
        except Misshapen as error:
            complaint = error if shape is not type(None) else complaint
    raise complaint


def _literal(value: object, allowed: tuple[Any, ...], where: str) -> Any:
    for word in allowed:
        if type(value) is type(word) and value == word:
            return word
    raise Misshapen(f"{where}: not one of {', '.join(map(str, allowed))}")


def _items(value: object, shape: Any, where: str, most: int) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) > most:
        raise Misshapen(f"{where}: not a list of at most {most} items")
    arguments = get_args(shape)
    if get_origin(shape) is tuple and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise Misshapen(f"{where}: not {len(arguments)} items")
        kinds = arguments
    else:
        kinds = (arguments[0],) * len(value)
    pairs = enumerate(zip(value, kinds, strict=True))
    found = [shaped(item, kind, f"{where}[{number}]") for number, (item, kind) in pairs]
    return found if get_origin(shape) is list else tuple(found)


def _mapping(value: object, shape: Any, where: str, most: int) -> dict[Any, Any]:
    if not isinstance(value, dict) or len(value) > most:
        raise Misshapen(f"{where}: not an object of at most {most} fields")
    kind, item_kind = get_args(shape)
    return {
        shaped(key, kind, f"a key of {where}"): shaped(item, item_kind, f"{where}.{str(key)[:40]}")
        for key, item in value.items()
    }


def _plain(value: object, shape: Any, where: str, most: int) -> Any:
    if shape is Any:
        return value
    if shape is None or shape is type(None):
        if value is None:
            return None
        raise Misshapen(f"{where}: not null")
    if shape is float and type(value) is int:
        return float(_number(value, where))
    if type(value) is not shape:
        raise Misshapen(f"{where}: {type(value).__name__} in place of {shape.__name__}")
    if shape in (int, float):
        return _number(value, where)
    if shape is str:
        return _text(value, where, most)
    return value


def _number(value: Any, where: str) -> Any:
    if not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:  # NaN is not, either
        raise Misshapen(f"{where}: a number beyond 2**53")
    return value


def _text(value: Any, where: str, most: int) -> str:
    if len(value) > most:
        raise Misshapen(f"{where}: longer than {most}")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Misshapen(f"{where}: text with a lone surrogate")
    return str(value)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
