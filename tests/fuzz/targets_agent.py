"""Fuzz targets: bytes from hosts and ranks give a value or HostLost."""

import functools
import io
import json
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from rackrun.launcher.errors import HostLost
from rackrun.launcher.output.console import progress_words
from rackrun.launcher.output.dashboard import Dashboard
from rackrun.launcher.output.run_view import view
from rackrun.launcher.remote.agent import frames, reports
from rackrun.launcher.run.events import AskedToStop, Event, Lost, RankEnded, Stopping, TorchrunEnded
from rackrun.launcher.run.job import Command, Job
from rackrun.launcher.run.plan import Plan, PlannedHost, make_plan
from rackrun.launcher.run.settings import Limits
from rackrun.launcher.run.state import RunState
from rackrun.launcher.supervision import hangs
from rackrun.launcher.supervision.agent_protocol import Decoder
from rackrun.launcher.supervision.reports import valid_fields
from rackrun.launcher.supervision.root_cause import Failure, cause_of, find_root_failure
from rackrun.run_folder import RunFolder
from tests.fuzz.decoders import coded, decoder

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
    **{"report": "y", "slow_rank": 1, "slow_why": "data", "slow": "z", "share": 0.5},
    **{"data_share": 0.1, "checkpoint": 4, "best": 0.5, "dataset": "x"},
    **{"data_seconds": 0.1, "compute_seconds": 0.2},
}
REPORTED = coded(REPORT)
LINES = [*(coded({"event": name, **fields}) for name, fields in EVENTS.items()), b"r" + REPORTED]


@functools.cache
def plan() -> Plan:
    """Return two hosts with two ranks each."""
    job = Job(Command(("x",)), RunFolder(Path("/x")))
    facts = [PlannedHost(f"node{n}", f"10.0.0.{n}", 2, "python", "/", "/x") for n in range(2)]
    return make_plan(job, facts, 1)


@decoder(*(frames.HEADER.pack(kind, 0, 9) + b"x" * 9 for kind in range(6)))
def fuzz_agent_frames(data: bytes) -> None:
    """Fuzz the bytes that an agent writes, in two pieces."""
    decoder = Decoder(plan().hosts[1])
    with suppress(HostLost):
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            for _ in decoder.feed(piece):
                pass


@decoder(REPORTED, b'{"rank": 0, "loss": 1e999}')
def fuzz_agent_reports(data: bytes) -> None:
    """Fuzz a datagram that a rank sends: first for the agent, then for the launcher."""
    json.dumps(reports.report_in(data))
    assert (
        len(json.dumps(valid_fields(data) or {}, allow_nan=False)) < 6 * reports.REPORT_BYTES + 100
    )


@decoder(b"\n".join(LINES), *LINES, coded({"event": "frozen", "names": ["rank " + "9" * 5000]}))
def fuzz_agent_events(data: bytes) -> None:
    """Fuzz lines of JSON as events of two hosts, taken through state, screens and verdict.

    A line that begins with "r" is a report of a rank.
    """
    run, troubles = RunState(plan(), 0.0), list[Failure]()
    streams = [Decoder(host) for host in plan().hosts]
    for number, line in enumerate(data.split(b"\n")[:24]):
        is_report = line.startswith(b"r")
        kind, payload = (frames.REPORT, line[1:]) if is_report else (frames.EVENT, line)
        frame = frames.HEADER.pack(kind, number % 3, len(payload)) + payload
        with suppress(HostLost):
            for event in streams[number % 2].feed(frame):
                take(event, run, troubles, float(number))
    show(run)
    hangs.find_absent(run, Limits(), 1e6)
    if hang := hangs.find_hang(run, Limits(hang_seconds=1.0), 1e6):
        troubles.append(hangs.split_network(hang, run))
    if troubles:
        cause_of(
            find_root_failure(troubles[:1], troubles[1:], lambda *source: ""), lambda *source: ""
        )


def take(event: Event, run: RunState, troubles: list[Failure], now: float) -> None:
    run.take(event, now)
    if isinstance(event, RankEnded | TorchrunEnded | AskedToStop | Lost | Stopping):
        troubles.append(event)


def show(run: RunState) -> None:
    """Draw everything that a screen shows of a run, at the narrowest and at the widest."""
    shown = view(run, "x", RunFolder(Path("/x")), 100.0, {})
    list(progress_words(shown))
    board = Dashboard()
    for width in (20, 200):
        board.console = Console(file=io.StringIO(), force_terminal=True, width=width, height=30)
        board.console.print(board.board(shown))
    assert [host.end_state for host in run.hosts]
    assert run.slow_host is None or run.slow
