"""What is known of a run, and answers of its hosts: fuzz targets, one for each decoder."""

import contextlib
import os
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from rackrun.launcher.output.run_view import RunView, view
from rackrun.launcher.remote import files, run_processes
from rackrun.launcher.run.events import Gpu, RankStarted, Report, Usage
from rackrun.launcher.run.state import RunState
from rackrun.launcher.viewer.reach import RunListing
from rackrun.run_files import RunEnd
from rackrun.run_folder import RunFolder
from rackrun.shapes import Misshapen, parsed_json, shaped
from tests.fuzz.decoders import coded, decoder
from tests.fuzz.targets_agent import plan

MOST_BYTES = 1 << 20
FINISH = {
    **{"verdict": "failed", "exit_code": 137, "cause": "exit code 137", "host": "node1"},
    **{"rank": 2, "log": "/x/logs/rank-2.err", "advice": "", "traceback": "", "seconds": 7.5},
    **{"codes": {"0": 0, "1": None, "2": 137}, "hosts": {"node1": "clean"}, "folder": "/x"},
    **{"report": {"final": "x"}, "saved": 3, "resume": "y", "attempts": [{"exit_code": 137}]},
}
LISTING = {
    "python": "/usr/bin/python3",
    "processes": [
        {"pid": 5, "scratch": "/tmp/x"},
        {"pid": 4, "scratch": ""},
    ],
}


def state() -> RunView:
    """Return what a run has in state.json."""
    run = RunState(plan(), 0.0)
    usage = Usage(0, 0.5, 1, 2, (Gpu(1, 2, 3),))
    fields = {"phase": "train", "step": 3, "steps": 9, "loss": 1e30, "epoch": 1, "epochs": 2}
    for event in (RankStarted(0, 1, 7), Report(0, 0, fields), usage):
        run.take(event, 1.0)
    return view(run, "true", RunFolder(Path("/x")), 2.0, {0: "a line"})


@decoder(coded(to_builtins(state())))
def fuzz_state(data: bytes) -> None:
    """Fuzz state.json of a run."""
    decode(data, RunView)


@decoder(coded(FINISH))
def fuzz_ending(data: bytes) -> None:
    """Fuzz result.json of a run."""
    decode(data, RunEnd)


@decoder(coded(LISTING))
def fuzz_listing(data: bytes) -> None:
    """Fuzz the list of a run's processes on a host."""
    decode(data, RunListing)


def decode(data: bytes, shape: type[Any]) -> None:
    with contextlib.suppress(Misshapen):
        shaped(parsed_json(data, MOST_BYTES), shape, "answer")


@decoder(coded([1, 2, 3, 4, "pid:[1]"]), b"5", b"[1, 2, 3, 4, {}]")
def fuzz_agent_pid(data: bytes) -> None:
    """Fuzz the file that identifies an agent, in a private folder of this account."""
    run = os.urandom(16).hex()
    folder = Path(f"/tmp/rackrun-{run}-0")
    folder.mkdir(0o700)
    try:
        (folder / "agent.pid").write_bytes(data)
        for identity in files.identities_in(str(folder)):
            assert all(type(number) is int for number in identity)
        assert len(run_processes.agents_of(run)) <= 1
    finally:
        (folder / "agent.pid").unlink()
        folder.rmdir()
