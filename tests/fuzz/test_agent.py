"""Bytes from hosts and ranks give a value or HostLost; never another error."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from rackrun.launcher.remote.agent.frames import HEADER, NO_RANK
from rackrun.launcher.supervision.agent_protocol import HOST_EVENTS, RANK_EVENTS
from rackrun.launcher.supervision.reports import FIELDS
from tests.fuzz.targets_agent import fuzz_agent_events, fuzz_agent_frames, fuzz_agent_reports

NUMBERS = st.integers() | st.floats() | st.sampled_from([2**31, 2**53, 10**400, -1, 40_000])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
EVENTS = {
    "opened": {"port": 1},
    "started": {"pid": 5},
    "ended": {"code": 0, "signal": 9, "oom": True, "ordered": False},
    "asked-to-stop": {"signal": 15},
    "computing": {},
    "torchrun-ended": {"code": 1, "signal": 0, "oom": False, "ordered": False},
    "frozen": {"names": ["rank 3"]},
    "joined": {},
    "stopping": {"reason": "x"},
    "unreached": {"addresses": ["10.0.0.0"]},
    "refused": {"reason": "y"},
    "closed": {"survivors": ["7 (x)"]},
    "usage": {
        **{"cpu": 0.5, "memory": 1, "memory_total": 2},
        "gpus": [{"busy": 1, "memory": 2, "memory_total": 3}],
    },
}
REPORT = {
    **{"phase": "train", "epoch": 1, "epochs": 2, "step": 5, "steps": 9, "epoch_step": 5},
    **{"epoch_steps": 9, "loss": 0.5, "accuracy": 0.5, "images_per_second": 5.0, "final": "x"},
    **{
        "report": "y",
        "slow_rank": 1,
        "slow_why": "data",
        "slow": "z",
        "share": 0.5,
        "data_share": 0.1,
    },
    **{"checkpoint": 4, "best": 0.5, "dataset": "x", "data_seconds": 0.1, "compute_seconds": 0.2},
}


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Draw events and reports that are valid but for some fields."""
    messages = []
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from([*EVENTS, ""]))
        fields = {"event": name, **EVENTS[name]} if name else dict(REPORT)
        for field in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
            fields[field] = draw(VALUES)
        messages.append(b"r" * (not name) + json.dumps(fields).encode())
    return b"\n".join(messages)


def test_the_examples_name_every_event_and_field():
    """What is mutated below is all that there is."""
    assert set(EVENTS) == {*RANK_EVENTS, *HOST_EVENTS}
    assert set(REPORT) == set(FIELDS)


@given(lines())
@example(json.dumps({"event": "frozen", "names": ["rank " + "9" * 5000]}).encode())
def test_events_of_other_types(data):
    """Fields of any type and size, through state, screens and verdict."""
    fuzz_agent_events(data)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 2, 9, NO_RANK]), st.binary()),
        max_size=5,
    ),
    st.binary(max_size=20),
)
def test_frames_of_any_bytes(frames, rest):
    """Any bytes, in frames or not."""
    framed = b"".join(HEADER.pack(kind, local, len(data)) + data for kind, local, data in frames)
    fuzz_agent_frames(framed + rest)


@given(st.binary() | lines())
@example(b"[" * 5000)
@example(b'{"rank": 1' + b"0" * 5000 + b"}")
@example(b'{"rank": 0, "loss": 1e999}')
def test_reports_of_any_bytes(data):
    """Any datagram."""
    fuzz_agent_reports(data)
