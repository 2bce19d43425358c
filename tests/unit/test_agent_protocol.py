"""Messages of a host are checked against their declared shape; any other is a lost host."""

import json
import time
from typing import Any

import pytest

from rackrun.launcher.errors import HostLost
from rackrun.launcher.remote.agent import frames
from rackrun.launcher.run.events import Closed, Event, Gpu, Lost, Output, RankEnded, Report, Usage
from rackrun.launcher.run.state import RunState
from rackrun.launcher.supervision import agent_protocol
from rackrun.launcher.supervision.reports import FIELDS
from tests.unit.planned import plan_of

PLAN = plan_of("node0", "node1", slots=2)


def frame(payload: bytes, kind: int = frames.EVENT, local: int = frames.NO_RANK) -> bytes:
    return frames.HEADER.pack(kind, local, len(payload)) + payload


def event(name: str, local: int = frames.NO_RANK, **fields: Any) -> bytes:
    return frame(json.dumps({"event": name, **fields}).encode(), local=local)


def heard(*frames: bytes, node: int = 0) -> list[Event]:
    """Return the events that come from the first or the second of two hosts."""
    return list(agent_protocol.Decoder(PLAN.hosts[node]).feed(b"".join(frames)))


GPU = {"busy": 90, "memory": 3, "memory_total": 8}
USAGE = {"cpu": 0.5, "memory": 1, "memory_total": 2, "gpus": []}
NONSENSE = {
    "too long": frames.HEADER.pack(frames.EVENT, 0, 2**31) + b"x",
    "no JSON": frame(b"{]}"),
    "deep": frame(b"[" * 100_000),
    "no object": frame(b"5"),
    "frame of a new kind": frame(b"", kind=9),
    "event of a new kind": event("unheard"),
    "event without a name": event([]),
    "unknown field": event("joined", who=1),
    "no port": event("opened"),
    "port": event("opened", port=70_000),
    "output of another rank": frame(b"x", frames.OUT, 2),
    "report of another rank": frame(b'{"step": 1}', frames.REPORT, 2),
    "end of another rank": event("ended", 5, code=0, signal=0, oom=False),
    "end of nobody": event("ended", code=0, signal=0, oom=False),
    "code of no process": event("ended", 0, code=256, signal=0),
    "signal by name": event("ended", 0, code=0, signal="KILL"),
    "long reason": event("stopping", reason="x" * 5000),
    "cpu that is none": event("usage", **{**USAGE, "cpu": float("nan")}),
    "gpus": event("usage", **{**USAGE, "gpus": [GPU] * 2000}),
}


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.security("HOST-1")
def test_nonsense_from_a_host_is_a_lost_host(name):
    """75, and never another error; test_shapes.py holds that every field has a range."""
    with pytest.raises(HostLost, match=agent_protocol.NONSENSE):
        heard(NONSENSE[name])


def test_what_an_agent_says_arrives():
    """Events carry the node and ranks of the sending host, whatever it calls itself."""
    message = heard(
        frame(b"hello", frames.OUT, 1),
        frame(b"torchrun", frames.ERR),
        event("ended", 1, code=7, signal=0, oom=False, ordered=True, node=0, rank=0),
        frame(b'{"step": 5, "secret": 1}', frames.REPORT, 0),
        event("usage", **{**USAGE, "gpus": [GPU]}),
        event("refused", reason="no", exit_code=0),
        event("closed", survivors=["7 (x)"]),
        node=1,
    )
    assert message == [
        Output(1, 3, "out", b"hello"),
        Output(1, None, "err", b"torchrun"),
        RankEnded(1, 3, 7, ordered=True),
        Report(1, 2, {"step": 5}),
        Usage(1, 0.5, 1, 2, (Gpu(90, 3, 8),)),
        Lost(1, "no", 78),
        Closed(1, ("7 (x)",)),
    ]


def test_memory_does_not_grow_with_what_ranks_report():
    """SSH-7: 3,000 reports of ever new names and of long values leave the known fields."""
    decoder = agent_protocol.Decoder(PLAN.hosts[0])
    run = RunState(PLAN, time.monotonic())
    for number in range(3000):
        fields = {f"name {number} {n}": n for n in range(200)} | {"step": number}
        report = json.dumps(fields).encode()
        for one in decoder.feed(frame(report, frames.REPORT, 0)):
            run.take(one, time.monotonic())
    assert run.rank(0).fields == {"step": 2999}
    assert len(FIELDS) <= 32


def test_a_rank_starts_and_ends_once():
    """A host cannot take back what it has said of a rank."""
    run = RunState(PLAN, time.monotonic())
    for message in (
        *heard(event("started", 0, pid=5), event("ended", 0, code=7, signal=0)),
        *heard(event("started", 0, pid=6), event("ended", 0, code=0, signal=0)),
    ):
        run.take(message, time.monotonic())
    ended = run.rank(0).ended
    assert run.rank(0).pid == 5
    assert ended is not None
    assert ended.code == 7
