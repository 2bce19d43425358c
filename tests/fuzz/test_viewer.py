"""What a run has written and its hosts answer is accepted or refused; no other error occurs."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rackrun.launcher.output.run_view import RunView, view
from rackrun.launcher.run.events import Gpu, RankStarted, Report, Usage
from rackrun.launcher.run.job import Command, Job
from rackrun.launcher.run.plan import PlannedHost, make_plan
from rackrun.launcher.run.result import Result, as_plain
from rackrun.launcher.run.state import RunState
from rackrun.launcher.viewer.replies import RunFacts, RunListing
from rackrun.run_folder import RunFolder
from rackrun.shapes import Misshapen, shaped
from tests.fuzz import targets_viewer as targets

FOLDER = RunFolder(Path("/home/me/runs/20260101-000000-true"))


def result() -> Result:
    output = ("failed", 137, "exit code 137", "node2", 2, FOLDER.log("node2", 2, "err"), 7.5)
    parts = ({0: 0, 1: None, 2: 137}, {"node1": "clean"}, {"final": "x"}, FOLDER.path)
    return Result(*output, "", "", *parts).after(None)


def state(folder: RunFolder = FOLDER) -> RunView:
    """Return a run of two hosts as state.json has it."""
    facts = [
        PlannedHost(name, name, ranks, "python3", "/home/me", str(FOLDER.path))
        for name, ranks in (("node1", 2), ("node2", 1))
    ]
    run = RunState(make_plan(Job(Command(("true",)), FOLDER, "ab" * 16), facts, 1), 0.0)
    fields = {"phase": "train", "step": 3, "steps": 9, "loss": 1e30, "epoch": 1, "epochs": 2}
    usage = Usage(0, 0.5, 1, 2, (Gpu(1, 2, 3),))
    for event in (RankStarted(0, 1, 7), Report(0, 0, fields), usage):
        run.take(event, 1.0)
    return view(run, "true", folder, 2.0, {0: "a line"})


FOUND = json.loads(
    json.dumps(
        {
            "folder": str(FOLDER.path),
            "live": msgspec.to_builtins(state()),
            "alive": True,
            "finish": as_plain(result()),
        },
        default=str,
    )
)
LISTING = {
    "python": "/usr/bin/python3",
    "processes": [
        {"role": "rank", "pid": 5, "state": "S", "seconds": 1.5, "rank": 0, "scratch": "/tmp/x"},
        {"role": "agent", "pid": 4, "state": "S", "seconds": 1.5, "lease_seconds": 3},
    ],
}


def test_what_is_written_is_understood():
    """The state of a run and its result come back as they were, also of one that diverges."""
    found = shaped(FOUND, RunFacts, "answer")
    assert found.live == state()
    assert found.finish is not None and found.finish.attempts[0]["exit_code"] == 137
    assert len(shaped(LISTING, RunListing, "answer").processes) == 2


def test_the_state_of_a_run_can_be_written_in_a_folder_whose_name_is_no_text():
    """Python has the bytes of a name that are not UTF-8 as surrogates, which JSON does not."""
    written = msgspec.json.encode(state(RunFolder(Path(os.fsdecode(b"/home/m\xe9/runs/x")))))
    assert msgspec.json.decode(written)["folder"] == "/home/m\\udce9/runs/x"


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
            if key not in ("report", "attempts")  # free of form
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
