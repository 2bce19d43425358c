"""Ends of a run that no fault of a contract test can cause: before ranks, or of torchrun alone."""

import os
import selectors
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.launcher.remote.agent.output import RankOutput as AgentOutput
from rackrun.launcher.remote.agent.torchrun import Torchrun
from tests.lab.hosts import BUSY
from tests.lab.needs import need
from tests.lab.waiting import until
from tests.launcher.drive import Drive

PYTHON = sys.executable
SECOND = "import os, sys, time; rank = int(os.environ['RANK'])\n"


def python(code: str) -> list[str]:
    return [PYTHON, "-c", SECOND + code]


@pytest.fixture
def cramped() -> Iterator[Path]:
    """Yield a memory cgroup of 64 MB without swap; a process joins it by its `cgroup.procs`."""
    need("root")
    old = Path("/sys/fs/cgroup/memory")
    folder = (old if old.exists() else old.parent) / f"rackrun-{os.getpid()}"
    folder.mkdir()
    limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max")
    for limit in limits:
        if (folder / limit).exists():
            (folder / limit).write_text("64000000")
    if (folder / "memory.swap.max").exists():
        (folder / "memory.swap.max").write_text("0")
    yield folder
    until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


class HeardEvents(list[dict[str, object]]):
    """What an agent would send to its launcher."""

    def send_event(self, **event: object) -> None:
        self.append(event)


def test_a_torchrun_that_the_kernel_kills_for_memory_is_named_so(tmp_path, cramped):
    """It outgrows its memory cgroup: the agent sees what killed it."""
    code = f"import os; open('{cramped}/cgroup.procs', 'w').write(str(os.getpid()));"
    args = [sys.executable, "-c", f"{code} b'x' * 300_000_000"]
    launcher = HeardEvents()
    torchrun = Torchrun({"torchrun": args, "defaults": (), "environment": ()}, launcher)
    with selectors.DefaultSelector() as selector:
        torchrun.start(AgentOutput(selector, launcher))
        until(lambda: torchrun.reap(asked_to_end=False) or not torchrun.alive)
    end = {"event": "torchrun-ended", "code": 0, "signal": 9, "oom": True, "ordered": False}
    assert launcher == [end]


def test_a_host_whose_agent_never_answers_is_lost_at_its_deadline(tmp_path):
    """One host never starts: 75 once its time to start is over, it is named, the other is clean."""
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexec sleep 98763\n")
    mute.chmod(0o755)
    drive = Drive(
        *(tmp_path, python("time.sleep(999)")),
        slots=[1, 1],
        agents=["python3", str(mute)],
        start_seconds=2.0,
    )
    assert drive.wait() == 75
    assert drive.result["cause"] == "no agent answered within 2 s"
    assert drive.result["host"] == "127.0.0.3"
    assert drive.result["hosts"]["127.0.0.2"] == "clean"
    assert drive.result["seconds"] < BUSY * (2.0 + 1.0 + 5.0)
