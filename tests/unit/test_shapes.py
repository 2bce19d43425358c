"""What comes from elsewhere is what its shape declares, or one clean refusal."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from rackrun.launcher.catalog import listed_runs
from rackrun.launcher.files import download, sync
from rackrun.launcher.output.event_log import EndLine
from rackrun.launcher.output.run_view import RunView
from rackrun.launcher.preflight import replies
from rackrun.launcher.rendezvous import gather
from rackrun.launcher.run import events
from rackrun.launcher.supervision import peers
from rackrun.launcher.viewer import reach
from rackrun.run_files import RunEnd, RunPlan
from rackrun.run_history import HostUsage
from rackrun.shapes import (
    Excerpt,
    Misshapen,
    Shape,
    Whole,
    at_most,
    between,
    matches,
    parsed,
    shaped,
)
from rackrun.shards.index import Manifest
from rackrun.training.track.tracker import Sent

DECLARED = [
    *(*replies.REPLIES, peers.PeerMessage),
    *(gather.NodeHello, gather.RendezvousOutcome, sync.Differences, sync.UploadProgress),
    *(download.OfferedFiles, download.Header, download.TransferEnd),
    *(*get_args(events.Event), RunView, EndLine, RunEnd, reach.RunListing),
    *(listed_runs.ReachedStep, RunPlan),
    *(HostUsage, Manifest, Sent),
]


class Gpu(Shape, frozen=True):
    used: Annotated[float, between(0, 100)]


class Message(Shape, frozen=True):
    local: Annotated[int, between(0, 4095)]
    code: Whole | None = None
    name: Annotated[str, matches("[a-z]{1,63}|")] = "a"
    kind: Literal["started", "ended"] = "started"
    hosts: Annotated[tuple[str, ...], at_most(4)] = ()
    gpus: tuple[Gpu, ...] = ()
    folder: Path = Path("runs")


@dataclass(frozen=True)
class Record:
    local: Whole


class Part(Excerpt, frozen=True):
    local: Whole


def test_what_fits_is_built():
    """Lists become tuples, whole numbers floats, text a path, nested objects their classes."""
    text = '{"local": 3, "gpus": [{"used": 5}], "hosts": ["a"], "code": null, "folder": "/a"}'
    built = Message(3, gpus=(Gpu(5.0),), hosts=("a",), folder=Path("/a"))
    assert parsed(text, Message, 1000) == built
    assert parsed('{"local": 3, "more": [1]}', Part, 1000) == Part(3)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ("5", "it: Expected `object`, got `int`"),
        ("", "missing required field `local`"),
        ('"local": true', "it.local"),
        ('"local": 1.5', "it.local"),
        ('"local": -1', "`int` >= 0"),
        ('"local": 1, "code": "x"', "it.code"),
        (f'"local": 1, "code": {"9" * 30}', "it.code"),
        ('"local": 1, "name": "A"', "matching regex"),
        (r'"local": 1, "name": "a\n"', "matching regex"),
        (r'"local": 1, "name": "\n"', "matching regex"),
        ('"local": 1, "kind": "Lost"', "it.kind"),
        ('"local": 1, "hosts": ["a", "a", "a", "a", "a"]', "length <= 4"),
        ('"local": 1, "hosts": "abc"', "Expected `array`"),
        ('"local": 1, "gpus": [{"used": 101}]', "it.gpus[0].used"),
        ('"local": 1, "gpus": [{"used": 1, "more": 1}]', "unknown field `more`"),
        ('"local": 1, "folder": 5', "it.folder"),
        (r'"local": 1, "\u001b[2J": 1', "unknown field `␛[2J`"),
        (r'"local": 1, "hosts": ["\ud800"]', "no JSON"),
        ('"local": 1, "code": NaN', "no JSON"),
        ('"local": 1, "gpus": [{"used": 1e999}]', "out of range"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(fields, says):
    """One clean line says where and what."""
    with pytest.raises(Misshapen) as caught:
        parsed(fields if fields == "5" else f"{{{fields}}}", Message, 1000)
    assert says in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_dataclass_refuses_unknown_fields_too():
    """They may be settings of a later version."""
    with pytest.raises(Misshapen, match="unknown field 'more'"):
        parsed('{"local": 1, "more": 1}', Record, 1000)


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b"-Infinity", b"1" * 5000, b"\xff", b"", b'{"a"', b"[1]" * 400, b"1 2"],
)
def test_what_is_no_json_is_refused(data):
    """Depth, constants, digits, encodings and length have one answer."""
    with pytest.raises(Misshapen):
        parsed(data, dict[str, Any], 200_000 if data[:2] == b"[[" else 1000)


@given(st.binary() | st.text())
def test_no_bytes_end_otherwise_than_parsed_or_refused(data):
    """Nothing but Misshapen leaves."""
    try:
        parsed(data, Message, 1 << 20)
    except Misshapen as error:
        assert str(error).isprintable()


@pytest.mark.parametrize("shape", DECLARED, ids=lambda shape: shape.__qualname__)
def test_declared_shapes_have_limits(shape):
    """Every number has a range, every pattern ends with the text; only excerpts skip fields."""
    for kind in inspect.multi_type_info([shape]):
        check(kind, shape)


def check(kind, shape):
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        assert kind.ge is not None, shape
        assert kind.le is not None, shape
    if isinstance(kind, inspect.StrType) and kind.pattern:
        assert kind.pattern.endswith(r")\Z"), shape
    if isinstance(kind, inspect.StructType):
        assert kind.forbid_unknown_fields or issubclass(kind.cls, Excerpt), shape
    for name in ("fields", "types", "item_types"):
        for part in getattr(kind, name, ()):
            check(getattr(part, "type", part), shape)
    for name in ("item_type", "key_type", "value_type"):
        if part := getattr(kind, name, None):
            check(part, shape)


BOMBS = {
    "lists": ("[", "[],", "0]"),
    "objects": ('{"a":[', '{"a":{}},', "0]}"),
    "texts": ("[", '"ab",', "0]"),
    "wide text": ('["\U0001f600', "a", '"]'),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_json_bomb_costs_little_memory(kind, tmp_path):
    """Each is within the largest number of bytes; decoded as it is, lists would take 1 GB."""
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


def test_threads_may_meet_a_shape_at_the_same_time():
    """As probes of many hosts do; msgspec alone crashed in two of fifteen tries."""
    script = (
        "import sys, threading; sys.setswitchinterval(1e-6)\n"
        "from rackrun.launcher.preflight.replies import Gpus, Route, checked_reply\n"
        "start = threading.Barrier(32)\n"
        "def ask():\n"
        "    start.wait()\n"
        "    checked_reply({'gpus': [{'name': 'x', 'total': 1, 'used': 1}]}, Gpus, 'a')\n"
        "    checked_reply({'unreached': ''}, Route, 'a')\n"
        "threads = [threading.Thread(target=ask) for _ in range(32)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
    )
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_text_that_no_encoding_has_is_misshapen():
    """A pickle may hold half of a surrogate pair, which JSON cannot."""
    with pytest.raises(Misshapen):
        shaped("\ud800", Message)
