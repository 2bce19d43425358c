"""Entries of a run and answers of its hosts are accepted or refused; no other error occurs."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rackrun.launcher.output.record import begin, encoded
from rackrun.launcher.run.events import (
    AskedToStop,
    Closed,
    Computing,
    Event,
    Frozen,
    Gpu,
    Joined,
    Lost,
    Opened,
    RankEnded,
    RankStarted,
    Report,
    Stopping,
    Swept,
    TorchrunEnded,
    Unreached,
    Usage,
)
from rackrun.launcher.run.job import Command, Job
from rackrun.launcher.run.plan import PlannedHost, make_plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.viewer.entries import EVENTS, EntryReader
from rackrun.launcher.viewer.replies import RunFacts, RunListing
from rackrun.run_folder import RunFolder
from rackrun.shapes import Misshapen, shaped
from tests.fuzz import targets_viewer as targets

FOLDER = Path("/home/me/runs/20260101-000000-true")
HAPPENED: tuple[Event, ...] = (
    Opened(0, 40000),
    Joined(0),
    RankStarted(0, 1, 7),
    Report(0, 0, {"phase": "train", "step": 3, "steps": 9, "loss": 0.5, "epoch": 1, "epochs": 2}),
    Report(1, 2, {"phase": "train", "slow_rank": 1, "slow_why": "data", "slow": "rank 1"}),
    Computing(0, 1),
    Usage(0, 0.5, 1, 2, (Gpu(1, 2, 3),)),
    Frozen(0, ("rank 0",)),
    Unreached(1, ("127.0.0.2",)),
    AskedToStop(0, 1, 15),
    RankEnded(0, 1, 0, 9, oom=True),
    TorchrunEnded(0, 1),
    Stopping(1, "lease"),
    Lost(1, "gone"),
    Swept(1, ("5 (python)",)),
    Closed(0, ()),
)


def result() -> Result:
    output = ("failed", 137, "exit code 137", "node2", 2, FOLDER / "logs/node2/rank-2.err", "")
    parts = ({0: 0, 1: None, 2: 137}, {"node1": "clean"}, 7.5, {"final": "x"}, FOLDER)
    return Result(*output, "", *parts)


def record_entries() -> list[dict[str, Any]]:
    """Return the entries of an attempt as they are written."""
    facts = [
        PlannedHost(name, name, ranks, "python3", "/home/me", str(FOLDER))
        for name, ranks in (("node1", 2), ("node2", 1))
    ]
    job = Job(Command(("true",)), RunFolder(FOLDER))
    finish = {**dataclasses.asdict(result()), "codes": dict(result().codes)}
    entries = [
        begin(job, make_plan(job, facts, 1)),
        {"turn": 0.5},
        {"note": "left out: node3"},
        *map(encoded, HAPPENED),
        {"output": [0, 1, "out", 10]},
        {"output": [0, None, "err", 10]},
        {"finish": finish},
        {"end": 137},
    ]
    return [dict(json.loads(json.dumps(entry, default=str))) for entry in entries]


RECORD = record_entries()


def test_every_kind_of_event_comes_back_from_a_record():
    """`attach` accepts all that is written: no kind is forgotten when one is added."""
    assert {type(event) for event in HAPPENED} == set(EVENTS.values())


FOUND = {
    "folder": str(FOLDER),
    "live": {
        "run_id": "ab" * 16,
        "seconds": 5.0,
        "hosts": [{"name": "node1", "node": 0, "state": "training", "step": 3}],
    },
    "alive": True,
    "finish": RECORD[-2]["finish"],
    "end": 137,
}
LISTING = {
    "python": "/usr/bin/python3",
    "processes": [
        {"role": "rank", "pid": 5, "state": "S", "seconds": 1.5, "rank": 0, "scratch": "/tmp/x"},
        {"role": "agent", "pid": 4, "state": "S", "seconds": 1.5, "lease_seconds": 3},
    ],
}


def test_what_is_written_is_understood():
    """Every entry and every event that there is, and it is the event that was written down."""
    reader = EntryReader()
    actual = [reader.entry(copy.deepcopy(entry)) for entry in RECORD]
    assert [entry for entry in actual if entry in HAPPENED] == list(HAPPENED)
    assert {type(event).__name__ for event in HAPPENED} == {*EVENTS}
    assert shaped(FOUND, RunFacts, "answer").finish is not None
    assert len(shaped(LISTING, RunListing, "answer").processes) == 2


WRONG_ENTRIES = {
    "nothing": {},
    "an unknown entry": {"boast": 1},
    "a name of the module": {"event": ["dataclass", {}]},
    "an error": {"event": ["HostLost", {"text": "x"}]},
    "a host": {"event": ["Opened", {"node": 9, "port": 1}]},
    "a host before the first": {"event": ["Joined", {"node": -1}]},
    "a rank": {"event": ["RankStarted", {"node": 0, "rank": 9, "pid": 1}]},
    "a rank of another host": {"event": ["RankStarted", {"node": 0, "rank": 2, "pid": 1}]},
    "a field": {"event": ["Joined", {"node": 0, "x": 1}]},
    "a code": {"event": ["RankEnded", {"node": 0, "rank": 0, "code": [1]}]},
    "no processor": {"event": ["Usage", {"node": 0, "cpu": 1e9, "memory": 1, "memory_total": 1}]},
    "a rank that wrote": {"output": [0, -1, "out", 0]},
    "a stream": {"output": [0, 0, "../x", 0]},
    "a size": {"output": [0, 0, "out", -5]},
    "a large size": {"output": [0, 0, "out", 1 << 40]},
    "a turn": {"turn": "x"},
    "a turn that is no number": {"turn": float("nan")},
    "a note": {"note": 5},
    "an end": {"end": "x"},
    "an exit code": {"end": 10**30},
}


@pytest.mark.parametrize("what", WRONG_ENTRIES)
def test_what_is_no_entry_is_refused(what):
    reader = EntryReader()
    with pytest.raises(Misshapen):
        reader.entry({"event": ["Joined", {"node": 0}]})  # before there is a plan
    reader.entry(copy.deepcopy(RECORD[0]))
    with pytest.raises(Misshapen):
        reader.entry(WRONG_ENTRIES[what])


WRONG_PLANS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no ranks": lambda attempt: attempt["plan"]["hosts"][0].update(processes=0),
    "ranks": lambda attempt: attempt["plan"]["hosts"][1].update(processes=10**12),
    "the world": lambda attempt: attempt["plan"].update(world_size=10**9),
    "the order": lambda attempt: attempt["plan"]["hosts"].reverse(),
    "no hosts": lambda attempt: attempt["plan"].update(hosts=[], world_size=0),
    "a name": lambda attempt: attempt["plan"]["hosts"][0].update(name="node1\x1b[2J"),
}


@pytest.mark.parametrize("what", WRONG_PLANS)
def test_what_is_no_attempt_is_refused(what):
    entry = copy.deepcopy(RECORD[0])
    WRONG_PLANS[what](entry["attempt"])
    with pytest.raises(Misshapen):
        EntryReader().entry(entry)


def test_an_answer_with_one_wrong_field_is_refused():
    """Each field in turn is of a type that no field has; the message names the place."""
    for reply, shape in ((FOUND, RunFacts), (LISTING, RunListing)):
        for changed, position in with_one_wrong(reply):
            with pytest.raises(Misshapen, match="^answer"):
                shaped(changed, shape, "answer")
            assert position


def with_one_wrong(value: Any) -> list[tuple[Any, str]]:
    """Return the value with each leaf replaced in turn, and the path of that leaf."""
    if isinstance(value, dict):
        pairs = list(value.items())
        return [
            ({**value, key: changed}, f"{key}.{position}")
            for key, item in pairs
            if key != "report"  # free of form
            for changed, position in with_one_wrong(item)
        ]
    if isinstance(value, list) and value:
        below = enumerate(value)
        return [
            ([*value[:n], changed, *value[n + 1 :]], f"{n}.{position}")
            for n, item in below
            for changed, position in with_one_wrong(item)
        ]
    return [([[{}]], "")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn, seeds: list[Any]) -> bytes:
    """Draw lines of JSON that are valid but for one leaf, or for some bytes."""
    lines = copy.deepcopy(seeds)
    target: Any = draw(st.sampled_from(lines))
    while isinstance(target, dict | list) and target:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = draw(st.sampled_from(keys))
        inner = target[key]
        if not isinstance(inner, dict | list) or not inner or draw(st.integers(0, 5)) == 0:
            target[key] = draw(JSON)
            break
        target = inner
    data = "\n".join(map(json.dumps, lines)).encode()
    if draw(st.booleans()):
        index = draw(st.integers(0, len(data)))
        data = data[:index] + draw(st.binary(max_size=4)) + data[index + draw(st.integers(0, 4)) :]
    return data


@given(mutated(RECORD) | st.binary())
@example(b"[" * 100_000)
@example(b"1" * 5_000)
def test_any_record_is_shown_or_refused(data):
    targets.fuzz_record(data)


@given(mutated([FOUND]) | st.binary())
@example(b"[" * 100_000)
def test_any_answer_about_a_run_is_understood_or_refused(data):
    targets.fuzz_found(data)


@given(mutated([LISTING]) | st.binary())
def test_any_list_of_processes_is_understood_or_refused(data):
    targets.fuzz_listing(data)


@given(mutated([[1, 2, 3, 4, "pid:[1]"]]) | st.binary())
@example(b"5")
@example(b"[" * 4_000)
@example(b"[1, 2, 3, 4, {}]")
@example(b"[[1], 2, 3, 4, [5]]")
def test_any_file_of_an_agent_names_processes_or_none(data):
    targets.fuzz_agent_pid(data)
