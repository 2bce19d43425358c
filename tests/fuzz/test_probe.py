"""Any answer, message or command line gives a value or a Problem."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rackrun.launcher.commands.settings import SshOptions
from rackrun.launcher.preflight.replies import SHAPES
from tests.fuzz import targets_probe as targets
from tests.launcher.conftest import BAD_URLS, HONEST, agreed

ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1.5, 2**53, 10**400, "", "x", "\x1b[31m", "\ud800", "../x"]
    ),
    st.sampled_from([[], [[]], {}, {"error": "x"}, {"": 1}, float("nan"), float("inf")]),
    st.text(max_size=8),
    st.integers(),
)


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all parts of a JSON value."""
    lists = enumerate(value) if isinstance(value, list) else ()
    below = value.items() if isinstance(value, dict) else lists
    return [way, *(folder for key, part in below for folder in places(part, (*way, key)))]


def replaced(value: Any, way: tuple[Any, ...], part: Any) -> Any:
    """Return the value with another part at this path, if the path exists."""
    if not way:
        return part
    if isinstance(value, dict):
        return {**value, way[0]: replaced(value.get(way[0]), way[1:], part)}
    if isinstance(value, list) and isinstance(way[0], int) and way[0] < len(value):
        return [*value[: way[0]], replaced(value[way[0]], way[1:], part), *value[way[0] + 1 :]]
    return value


def changed(honest: Any) -> st.SearchStrategy[Any]:
    """Draw a JSON value of which up to three parts are odd."""
    change = st.tuples(st.sampled_from([*places(honest), ("more",)]), ODD)
    return st.lists(change, max_size=3).map(lambda changes: all_replaced(honest, changes))


def all_replaced(value: Any, changes: list[tuple[tuple[Any, ...], Any]]) -> Any:
    """Return the value with all of these parts replaced."""
    for way, part in changes:
        value = replaced(value, way, part)
    return value


ANSWERS = {
    "look": targets.LOOK,
    "image": {"id": "a1", "interpreter": {"version": "3.11.7"}},
    "gpus": {
        "gpus": [{"name": "H200", "total": 1, "used": 1}],
        "processes": [{"pid": 1, "name": "python"}],
    },
    "code": {"missing": ["a"], "different": ["b"], "count": 2},
    "address": {"address": "10.0.0.1"},
    "route": {"address": "10.0.0.1", "interface": "eth0", "master": "10.0.0.2"},
    "listen": {"port": 1},
    "release_port": {},
    "reach": {"error": "x"},
    "shards": {"dataset": "toy"},
    "clock": {"time": 1.0},
    "hold": {"holder": ""},
    "unlock": {},
    "occupancy": {
        **{"time": 1.0, "load": 0.5, "cores": 8, "gpus": 2, "disk_free": 1, "lock_problem": ""},
        "uses": [{"part": ".gpu0", "user": "a", "since": 1.0, "run": "ab" * 16, "name": "x"}],
        "queue": [{"user": "b", "since": 2.0}],
        "drained": "fan is broken",
    },
}


def test_every_question_is_asked():
    """The table above is whole."""
    assert ANSWERS.keys() == SHAPES.keys()


def coded(value: Any) -> bytes:
    return json.dumps(value).encode()


replies = st.sampled_from(targets.QUESTIONS).flatmap(
    lambda question: changed(ANSWERS[question]).map(
        lambda value: bytes([targets.QUESTIONS.index(question)]) + coded(value)
    )
)
calls = st.one_of(
    changed({"hello": HONEST}),
    changed({"agreed": {**agreed(), "resume": "20260101-120000-x", "data": "http://10.0.0.1/"}}),
    changed({"refused": "no", "code": 64}),
    changed({"failed": {"node": 1, "text": "x", "exit_code": 1, "secondary": True}}),
    changed({"hang_limit": {"node": 1, "seconds": 1.0}, "stop": {"node": 1, "signal": 15}}),
).map(coded)
lists = st.text("an0129,[]-. x", max_size=40).map(str.encode)
values = st.text("0129,[]-.x()an:", max_size=20).map(str.encode) | st.binary(max_size=20)
environments = st.lists(
    st.tuples(st.integers(0, len(targets.VARIABLES) - 1), values), max_size=12
).map(lambda pairs: b"\0".join(bytes([which]) + value for which, value in pairs))
starts = [url[at:] for url, _ in BAD_URLS for at in (0, 7, 9)]
starts += ["http://h/", "http://[::1]:8080/"]
parts = st.sampled_from(starts).map(lambda text: text.encode("utf-8", "surrogateescape"))
urls = st.lists(parts | st.binary(max_size=5), max_size=3).map(b"".join)
words = st.sampled_from(
    [
        *(f"--{name.replace('_', '-')}" for name in SshOptions.__dataclass_fields__),
        *(
            "catdog",
            "imagenet",
            "--data",
            "http://[",
            "--",
            "hosts.txt",
            "1,2",
            "-1",
            "x=y",
            "9" * 30,
        ),
    ]
)
lines = st.lists(words | st.text(max_size=8), max_size=8).map(
    lambda result: "\0".join(result).encode("utf-8", "surrogatepass")
)


@given(replies | st.binary())
def test_answers_of_a_probe(data):
    """Believed, judged and shown; or Misshapen."""
    targets.fuzz_probe_answer(data)


@given(calls | st.binary())
def test_the_roll_call_and_peers(data):
    """Both directions."""
    targets.fuzz_roll_call(data)


@given(lists | st.binary())
def test_lists_of_nodes(data):
    """Of any length that fits, and no hang."""
    targets.fuzz_node_list(data)


@given(environments | st.binary())
def test_environments_of_schedulers(data):
    """A seat, or what to type."""
    targets.fuzz_environment(data)


@given(urls | st.binary())
def test_urls(data):
    """Fit for a rank, or refused."""
    targets.fuzz_data_url(data)


@settings(deadline=None, max_examples=30)  # the library behind it takes 25 ms each
@given(lines | st.binary())
def test_command_lines(data):
    """Options, or one line."""
    targets.fuzz_command_line(data)
