"""Decoders of external data, and inputs for them: right ones with damage, and any bytes at all.

A decoder is a function of `targets_*.py` that takes bytes and raises nothing: it lets the
documented error of what it calls pass, and checks what else is promised.
"""

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st
from msgspec import inspect

Function = Callable[[bytes], None]
DECODERS: list["Decoder"] = []
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([2**31, 2**53, 2**63, 10**400, -1, 40_000, "", ".", "..", "../x", "a/b"])
    | st.sampled_from(["/etc/x", "plan.json", "logs/a", "\0", "\ud800", "\x1b[31m", "9" * 5000])
)
ODD = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
"""Values of JSON where others belong."""
JUNK = st.binary(max_size=12) | st.sampled_from(
    [b"[" * 5000, b"9" * 5000, b'{"rank": 1' + b"0" * 5000 + b"}", b"\x1b]0;x\x07", b"-1", b"1e999"]
)


class Decoder(NamedTuple):
    """A function, right inputs for it, and words of which its inputs consist."""

    function: Function
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...]

    @property
    def name(self) -> str:
        """Return its name, also that of its folder."""
        return f"{self.function.__module__.rpartition('_')[2]}-{self.function.__name__}"

    @property
    def inputs(self) -> st.SearchStrategy[bytes]:
        """Draw any bytes, seeds with damage, and words in any order."""
        drawn = st.binary(max_size=2000) | JUNK
        if self.seeds:
            drawn |= damaged(self.seeds)
        if self.words:
            drawn |= st.lists(st.sampled_from(self.words) | JUNK, max_size=30).map(b"".join)
        return drawn


def decoder(*seeds: bytes, words: tuple[bytes, ...] = ()) -> Callable[[Function], Function]:
    """Make a function a decoder that is to be tried."""

    def add(function: Function) -> Function:
        DECODERS.append(Decoder(function, seeds, words))
        return function

    return add


def decoders() -> list[Decoder]:
    """Return all decoders; this imports the files of targets."""
    for path in sorted(Path(__file__).parent.glob("targets_*.py")):
        import_module(f"tests.fuzz.{path.stem}")
    return DECODERS


@st.composite
def damaged(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """Draw a seed with odd parts in a line of JSON, or with bytes exchanged, cut out or put in."""
    data = draw(st.sampled_from(seeds))
    if draw(st.booleans()):
        lines = data.split(b"\n")
        number = draw(st.integers(0, len(lines) - 1))
        lines[number] = with_odd_parts(draw, lines[number])
        return b"\n".join(lines)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        end = at + draw(st.integers(0, 12))
        data = data[:at] + draw(JUNK | st.just(data[at:end] * 2)) + data[end:]
    return data


def with_odd_parts(draw: st.DrawFn, line: bytes) -> bytes:
    """Return a line with up to three parts of its JSON replaced; something may precede that."""
    start = min((at for at in (line.find(b"{"), line.find(b"[")) if at >= 0), default=len(line))
    try:
        value = json.loads(line[start:])
    except ValueError:
        return line
    for _ in range(draw(st.integers(1, 3))):
        value = replaced(draw, value)
    return line[:start] + json.dumps(value).encode()


def replaced(draw: st.DrawFn, value: Any) -> Any:
    """Return the value with another one at a random place of it."""
    if not isinstance(value, dict | list) or not draw(st.integers(0, 9)):
        return draw(ODD)
    if isinstance(value, dict):
        key = draw(st.sampled_from([*value, "more"]))
        return {**value, key: replaced(draw, value.get(key))}
    if not value:
        return [draw(ODD)]
    at = draw(st.integers(0, len(value) - 1))
    return [*value[:at], replaced(draw, value[at]), *value[at + 1 :]]


TEXTS = ("10.0.0.1", "x", "/w", "0" * 32, "0" * 16, "20260101-120000-x", "/tmp/rackrun-a.lock", "")
"""One of them has the form of any text."""


def example(shape: Any) -> Any:
    """Return a value of a declared shape, as JSON has it."""
    return of_kind(inspect.type_info(shape))


def of_kind(kind: Any) -> Any:
    """Return a value of a kind of msgspec's."""
    if fields := getattr(kind, "fields", ()):
        return {field.encode_name: of_kind(field.type) for field in fields}
    if isinstance(kind, inspect.UnionType):
        return of_kind(next(each for each in kind.types if each != inspect.NoneType()))
    if isinstance(kind, inspect.LiteralType):
        return kind.values[0]
    if isinstance(kind, inspect.DictType):
        return {of_kind(kind.key_type): of_kind(kind.value_type)}
    if isinstance(kind, inspect.TupleType):
        return [of_kind(each) for each in kind.item_types]
    if item := getattr(kind, "item_type", None):
        return [of_kind(item)]
    if isinstance(kind, inspect.StrType):
        return next(text for text in TEXTS if re.match(kind.pattern or "", text))
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return min(max(1, kind.ge), kind.le)
    return False if isinstance(kind, inspect.BoolType) else "x"


def coded(*values: object) -> bytes:
    """Return lines of JSON."""
    return b"\n".join(json.dumps(value).encode() for value in values)
