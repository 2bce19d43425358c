"""Data from another machine or account, decoded once where it arrives, into a declared type.

A frame of an agent, a file on a host, an index on a server: none of it is trusted. `parsed` reads
JSON within a number of bytes, `shaped` what another decoder has read; both raise `Misshapen`, whose
message names the place. Shapes are classes whose fields have ranges and forms:

    class Rank(Shape, frozen=True):
        local: Annotated[int, between(0, 4095)]
        code: Whole | None = None                       # has a default, so it may be missing
        name: Annotated[str, matches(r"[a-z]{1,63}")] = ""
        hosts: Annotated[tuple[str, ...], at_most(1024)] = ()

A number without a range of its own is `Whole` or `Real`: msgspec takes integers of any length. Text
and collections without a limit are bounded by the bytes that they came in. Dataclasses are shapes,
too; of those, only the outermost refuses unknown fields.
"""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from rackrun.terminal import one_line

LARGEST_NUMBER = 2**53  # what JSON's numbers hold exactly everywhere
MOST_VALUES = 2 << 20
"""Values in a JSON text, counted before decoding: an empty list takes 3 bytes there, 64 here."""
MOST_LETTERS = 300  # of a message, which may quote a name from the data

T = TypeVar("T")

_PREPARING, _PREPARED = threading.Lock(), set[Any]()


class Misshapen(ValueError):
    """Data that does not match its declared shape; the message names the path and the rule."""


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of messages: fields that are not declared are refused, at any depth."""


class Excerpt(msgspec.Struct, frozen=True):
    """Base of what is read of a document that has more: other fields are skipped."""


def between(least: float, most: float = LARGEST_NUMBER) -> msgspec.Meta:
    """Return the rule for numbers from `least` to `most`, both included."""
    return msgspec.Meta(ge=least, le=most)


def at_most(limit: int) -> msgspec.Meta:
    """Return the rule for text of so many characters, or a collection of so many items."""
    return msgspec.Meta(max_length=limit)


def matches(pattern: str) -> msgspec.Meta:
    r"""Return the rule for text that the regular expression matches as a whole: `$` allows `\n`."""
    return msgspec.Meta(pattern=rf"^(?:{pattern})\Z")


Whole = Annotated[int, between(-LARGEST_NUMBER)]
Real = Annotated[float, between(-LARGEST_NUMBER)]
Count = Annotated[int, between(0)]


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
    try:
        text = data if isinstance(data, bytes) else data.encode()
        if sum(map(text.count, (b",", b":", b"[", b"{"))) > MOST_VALUES:
            raise Misshapen(f"more than {MOST_VALUES:,} values")
        return msgspec.json.decode(text)
    except RecursionError:
        raise Misshapen("nested too deeply") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Misshapen(f"no JSON: {str(error)[:100]}") from None


def shaped(value: object, shape: Any, where: str = "it") -> Any:
    """Return `value` as a `shape`, or raise Misshapen; lists become tuples, and text paths.

    The message has the place first, as `plan.hosts[0].port`: `where` is the name of the whole.
    """
    try:
        if dataclasses.is_dataclass(shape) and isinstance(value, dict):
            known = {field.name for field in dataclasses.fields(shape)}
            if unknown := value.keys() - known:
                raise Misshapen(f"{where}: unknown field {one_line(min(map(str, unknown)))[:40]!r}")
        _prepare(shape)
        return msgspec.convert(value, shape, dec_hook=_as_path)
    except (msgspec.ValidationError, TypeError, RecursionError, UnicodeError) as error:
        rule, _, path = str(error).partition(" - at `$")
        place = f"{where}{path.rstrip('`')}"
        raise Misshapen(one_line(f"{place}: {rule}")[:MOST_LETTERS]) from None


def _prepare(shape: Any) -> None:
    """Have msgspec describe a type to itself, which crashes if threads do it at the same time."""
    with _PREPARING:
        if shape not in _PREPARED:
            msgspec.json.Decoder(shape, dec_hook=_as_path)
            _PREPARED.add(shape)


def _as_path(shape: type, value: object) -> Path:
    """Return text as a path, the one type here that JSON does not have."""
    if shape is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"no {shape.__name__} can be sent")
