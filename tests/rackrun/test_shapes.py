"""What comes from elsewhere is what its shape declares, or one clean refusal."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.shapes import AtMost, Between, Matches, Misshapen, parsed, parsed_json, shaped


@dataclass(frozen=True)
class Gpu:
    used: Annotated[float, Between(0, 100)]


@dataclass(frozen=True)
class Message:
    local: Annotated[int, Between(0, 4095)]
    code: int | None = None
    name: Annotated[str, Matches("[a-z]{1,63}")] = "a"
    kind: Literal["started", "ended"] = "started"
    hosts: Annotated[tuple[str, ...], AtMost(4)] = ()
    gpus: tuple[Gpu, ...] = ()
    pair: tuple[int, str] = (0, "")
    facts: dict[str, int] | None = None
    words: Annotated[str, AtMost(100_000)] = ""
    folder: Path = Path("runs")
    pending: Mapping[str, int] = field(default_factory=dict)


def test_what_fits_is_built():
    """Lists become tuples, whole numbers floats, text a path, nested objects their dataclasses."""
    text = '{"local": 3, "gpus": [{"used": 5}], "pair": [1, "x"], "facts": {"a": 1}, "code": null}'
    expected = Message(3, gpus=(Gpu(5.0),), pair=(1, "x"), facts={"a": 1})
    assert parsed(text, Message, 1000) == expected
    expected = Message(3, folder=Path("/a"), pending={"code": 1})
    assert parsed('{"local": 3, "folder": "/a", "pending": {"code": 1}}', Message, 99) == expected
    assert (
        len(parsed(json.dumps({"local": 1, "words": "x" * 99_999}), Message, 10**6).words) > 2**16
    )


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (5, "it: not an object"),
        ({}, "no field 'local'"),
        ({"local": True}, "it.local: bool in place of int"),
        ({"local": 1.0}, "it.local: float in place of int"),
        ({"local": -1}, "it.local: not between 0 and 4095"),
        ({"local": 10**400}, "it.local: a number beyond"),
        ({"local": 1, "code": "x"}, "it.code: str in place of int"),
        ({"local": 1, "name": "A"}, "it.name: not of the expected form"),
        ({"local": 1, "name": "a\n"}, "it.name: not of the expected form"),
        ({"local": 1, "kind": "Lost"}, "it.kind: not one of started, ended"),
        ({"local": 1, "hosts": ["a"] * 5}, "it.hosts: not a list of at most 4 items"),
        ({"local": 1, "hosts": "abc"}, "it.hosts: not a list"),
        ({"local": 1, "gpus": [{"used": float("nan")}]}, "it.gpus[0].used: a number beyond"),
        ({"local": 1, "gpus": [{"used": 101}]}, "it.gpus[0].used: not between"),
        ({"local": 1, "pair": [1]}, "it.pair: not 2 items"),
        ({"local": 1, "facts": {"a": "b"}}, "it.facts.a: str in place of int"),
        ({"local": 1, "hosts": ["\ud800"]}, "it.hosts[0]: text with a lone surrogate"),
        ({"local": 1, "words": "x" * 100_001}, "it.words: longer than 100000"),
        ({"local": 1, "folder": 5}, "it.folder: int in place of str"),
        ({"local": 1, "pending": []}, "it.pending: not an object"),
        ({"local": 1, "more": 1}, "unknown field 'more'"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(value, says):
    """The message says where and what; the value itself is not repeated."""
    with pytest.raises(Misshapen) as caught:
        shaped(value, Message)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"NaN", b"-Infinity", b"1" * 5000, b"\xff", b"", b'{"a"', b"[1]" * 400]
)
def test_what_is_no_json_is_refused(data):
    """Depth, constants, digits, encodings and length have one answer."""
    with pytest.raises(Misshapen):
        parsed_json(data, 200_000 if data[:2] == b"[[" else 1000)
        parsed(data, Message, 1000)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
names = st.sampled_from([*Message.__dataclass_fields__, "other"])


@given(st.dictionaries(names, plain) | plain)
def test_no_value_ends_otherwise_than_built_or_refused(value):
    """Whatever is sent, nothing but Misshapen leaves."""
    try:
        result = shaped(value, Message)
    except Misshapen:
        return
    assert isinstance(result, Message)


@given(st.binary() | st.text())
def test_no_bytes_end_otherwise_than_parsed_or_refused(data):
    """The same for what is not even JSON."""
    with contextlib.suppress(Misshapen):
        parsed(data, Message, 1 << 20)


BOMBS = {
    "lists": ("[", "[],", "0]"),
    "objects": ('{"a":[', '{"a":{}},', "0]}"),
    "texts": ("[", '"ab",', "0]"),
    "wide text": ('["\U0001f600', "a", '"]'),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_json_bomb_costs_little_memory_and_time(kind, tmp_path):
    """Each is within the largest number of bytes; parsed as it is, lists would take 1 GB."""
    bomb = tmp_path / "bomb.json"
    begin, middle, end = BOMBS[kind]
    bomb.write_text(begin + middle * ((32 << 20) // len(middle)) + end, encoding="utf-8")
    script = (
        "import resource, sys; from pathlib import Path; from rackrun import shapes\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    shapes.parsed_file(Path(sys.argv[1]), dict[str, int], 33 << 20)\n"
        "except shapes.Misshapen as error:\n"
        "    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, bomb], capture_output=True, text=True)
    assert int(done.stdout) < 300, done.stdout
