"""Check data from another machine or account against a declared shape before any use.

A frame of an agent, a file on a host, an index on a server: none of it is trusted. `parsed_json`
reads JSON within limits; `shaped` turns the result into a declared type, or raises `Misshapen`,
whose message names the place; `parsed` and `parsed_file` do both. Shapes are ordinary annotations:

    @dataclass(frozen=True)
    class Rank:
        local: Annotated[int, Between(0, 4095)]
        code: int | None = None                       # has a default, so it may be missing
        name: Annotated[str, Matches(r"[a-z]{1,63}")] = ""
        hosts: Annotated[tuple[str, ...], AtMost(1024)] = ()

    shaped({"local": 3}, Rank)  ->  Rank(local=3, code=None, name="", hosts=())

Without a limit of their own, numbers stay within 2**53 and are finite, text within 64 KiB, and
collections within 65,536 items. Unknown fields are refused. Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

LARGEST_NUMBER = 2**53  # what JSON's numbers hold exactly everywhere
LONGEST_TEXT = 1 << 16
MOST_ITEMS = 1 << 16
MOST_VALUES = 2 << 20
"""In a JSON text, counted before it is parsed: an empty list takes 3 bytes there, and 64 here."""

T = TypeVar("T")


class Misshapen(ValueError):
    """Data that does not match its declared shape; the message names the path and the rule."""

    def __init__(self, rule: str) -> None:
        """Take the rule that the value breaks; the path is added on the way up."""
        super().__init__(rule)
        self.path = ""

    def __str__(self) -> str:
        """Return `path: rule`."""
        return f"{self.path}: {self.args[0]}" if self.path else str(self.args[0])

    def below(self, path: str) -> Misshapen:
        """Return the same, for a value that is at this path below another one."""
        self.path = path + self.path
        return self


@dataclass(frozen=True)
class Between:
    """Numbers from `least` to `most`, both included; `description` replaces that in messages."""

    least: float
    most: float = LARGEST_NUMBER
    description: str = ""

    def __str__(self) -> str:
        """Return the range in words."""
        if self.description:
            return self.description
        is_open = self.most == LARGEST_NUMBER
        return f"{self.least} or more" if is_open else f"between {self.least} and {self.most}"

    def check(self, value: Any) -> None:
        """Raise Misshapen for a number outside."""
        if not self.least <= value <= self.most:
            raise Misshapen(f"not between {self.least} and {self.most}")


@dataclass(frozen=True)
class AtMost:
    """Text of at most `limit` characters, or a collection of at most `limit` items."""

    limit: int


@dataclass(frozen=True)
class Matches:
    """Text that the regular expression matches as a whole."""

    pattern: str

    def check(self, value: Any) -> None:
        """Raise Misshapen for other text."""
        if not re.fullmatch(self.pattern, value):
            raise Misshapen("not of the expected form")


def parsed(data: bytes | str, shape: type[T], most_bytes: int) -> T:
    """Return JSON as a `shape`; raise Misshapen for anything else or more than `most_bytes`."""
    value: T = shaped(parsed_json(data, most_bytes), shape)
    return value


def parsed_file(path: Path, shape: type[T], most_bytes: int) -> T:
    """Return the JSON of a file as `parsed` does, without reading more than its limit."""
    with path.open("rb") as file:
        return parsed(file.read(most_bytes + 1), shape, most_bytes)


def parsed_json(data: bytes | str, most_bytes: int) -> Any:
    """Return the value of a JSON text; raise Misshapen for what is none, too long, or too deep.

    Values are counted by the characters before them, those within text included.
    """
    if len(data) > most_bytes:
        raise Misshapen(f"longer than {most_bytes} bytes")
    text = data if isinstance(data, bytes) else data.encode(errors="surrogatepass")
    if sum(map(text.count, (b",", b":", b"[", b"{"))) > MOST_VALUES:
        raise Misshapen(f"more than {MOST_VALUES:,} values")
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise Misshapen("nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, an integer of thousands of digits
        raise Misshapen(f"no JSON: {str(error)[:100]}") from None


def shaped(value: object, shape: Any, where: str = "it") -> Any:
    """Return `value` as a `shape`, or raise Misshapen; lists become tuples, and text paths."""
    try:
        return _checker(shape, None)(value)
    except Misshapen as error:
        raise error.below(where) from None


Checker = Callable[[Any], Any]


@functools.cache
def _checker(shape: Any, most: int | None) -> Checker:
    """Return the function that checks values of a shape; made once for each.

    `most`: the longest text or collection, where the default limits are not meant.
    """
    origin = get_origin(shape)
    if origin is Annotated:
        return _annotated(shape)
    if dataclasses.is_dataclass(shape):
        return _object(shape)
    if origin in (Union, types.UnionType):
        return _one_of(get_args(shape))
    if origin is Literal:
        return _literal(get_args(shape))
    if origin in (tuple, list):
        return _items(shape, MOST_ITEMS if most is None else most)
    if origin in (dict, Mapping):
        return _mapping(shape, MOST_ITEMS if most is None else most)
    return _plain(shape, LONGEST_TEXT if most is None else most)


def _annotated(shape: Any) -> Checker:
    inner, *rules = get_args(shape)
    limits: list[int | None] = [rule.limit for rule in rules if isinstance(rule, AtMost)]
    check = _checker(inner, *(limits or [None]))
    further = [rule.check for rule in rules if hasattr(rule, "check")]  # others may annotate, too
    if not further:
        return check

    def checked(value: Any) -> Any:
        accepted = check(value)
        for rule in further:
            rule(accepted)
        return accepted

    return checked


def _object(shape: Any) -> Checker:
    hints = get_type_hints(shape, include_extras=True)
    fields = [field for field in dataclasses.fields(shape) if field.init]
    checks = {field.name: _checker(hints[field.name], None) for field in fields}
    missing = dataclasses.MISSING
    needed = [f.name for f in fields if f.default is missing and f.default_factory is missing]

    def built(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Misshapen("not an object")
        given = {}
        for name, item in value.items():
            if name not in checks:
                raise Misshapen(f"unknown field {str(name)[:40]!r}")
            try:
                given[name] = checks[name](item)
            except Misshapen as error:
                raise error.below(f".{name}") from None
        for name in needed:
            if name not in given:
                raise Misshapen(f"no field {name!r}")
        return shape(**given)

    return built


def _one_of(shapes: tuple[Any, ...]) -> Checker:
    checks = [_checker(shape, None) for shape in shapes if shape is not type(None)]
    may_be_none = len(checks) < len(shapes)

    def checked(value: Any) -> Any:
        if value is None and may_be_none:
            return None
        complaint = Misshapen("of the wrong type")
        for check in checks:
            try:
                return check(value)
            except Misshapen as error:
                complaint = error
        raise complaint

    return checked


def _literal(allowed: tuple[Any, ...]) -> Checker:
    def checked(value: Any) -> Any:
        for choice in allowed:
            if type(value) is type(choice) and value == choice:
                return choice
        raise Misshapen(f"not one of {', '.join(map(str, allowed))}")

    return checked


def _items(shape: Any, most: int) -> Checker:
    arguments = get_args(shape)
    is_record = get_origin(shape) is tuple and arguments[-1] is not Ellipsis
    checks = [_checker(kind, None) for kind in (arguments if is_record else arguments[:1])]
    collection: Any = get_origin(shape)

    def checked(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) > most:
            raise Misshapen(f"not a list of at most {most} items")
        if is_record and len(value) != len(checks):
            raise Misshapen(f"not {len(checks)} items")
        items: list[Any] = []
        try:
            for item, check in zip(
                value, checks if is_record else itertools.repeat(checks[0]), strict=False
            ):
                items.append(check(item))
        except Misshapen as error:
            raise error.below(f"[{len(items)}]") from None
        return collection(items)

    return checked


def _mapping(shape: Any, most: int) -> Checker:
    check_key, check_item = (_checker(kind, None) for kind in get_args(shape))

    def checked(value: Any) -> Any:
        if not isinstance(value, dict) or len(value) > most:
            raise Misshapen(f"not an object of at most {most} fields")
        fields = {}
        for key, item in value.items():
            try:
                fields[check_key(key)] = check_item(item)
            except Misshapen as error:
                raise error.below(f".{str(key)[:40]}") from None
        return fields

    return checked


def _plain(shape: Any, most: int) -> Checker:
    if shape is Any:
        return lambda value: value
    if shape is str:
        return functools.partial(_text, most)
    if shape is Path:
        return lambda value: Path(_text(most, value))
    if shape in (int, float):
        return functools.partial(_number, shape)

    def checked(value: Any) -> Any:
        if value is not shape and type(value) is not (shape or type(None)):
            raise _of_another_type(value, shape or type(None))
        return value

    return checked


def _number(shape: type, value: Any) -> Any:
    is_whole = shape is float and type(value) is int
    if type(value) is not shape and not is_whole:
        raise _of_another_type(value, shape)
    if not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:  # NaN is not, either
        raise Misshapen("a number beyond 2**53")
    return float(value) if is_whole else value


def _text(most: int, value: Any) -> str:
    if type(value) is not str:
        raise _of_another_type(value, str)
    if len(value) > most:
        raise Misshapen(f"longer than {most}")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Misshapen("text with a lone surrogate")
    return value


def _of_another_type(value: object, shape: type) -> Misshapen:
    return Misshapen(f"{type(value).__name__} in place of {shape.__name__}")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
