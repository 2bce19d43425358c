"""Nothing survives, whatever dies: every process of a run, times every signal."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.hosts import BUSY
from tests.lab.waiting import until
from tests.launcher.conftest import KINDS, pid_of
from tests.launcher.drive import SHORT, Drive

SIGNALS = ("KILL", "TERM", "INT", "STOP", "HUP")
LEASE_SECONDS, HANG_SECONDS, CHECKPOINT_SECONDS = (
    SHORT[f"{name}_seconds"] for name in ("lease", "hang", "checkpoint")
)

RANK = (  # with a child as a loader worker would be, which knows nothing of all this
    "import os, time\n"
    "if os.fork() == 0:\n"
    "    os.execvp('sleep', ['sleep', '98765'])\n"
    "time.sleep(98764)\n"
)
CODES = {  # of the launcher
    "rank": {"KILL": 137, "TERM": 143, "INT": 130, "HUP": 129, "STOP": 75},
    "shim": {"KILL": 137, "TERM": 75, "INT": 75, "HUP": 75, "STOP": 75},
    "torchrun": dict.fromkeys(SIGNALS, 75),
    "agent": dict.fromkeys(SIGNALS, 75),
    "launcher": {"TERM": 143, "INT": 130, "HUP": 129},
}


def start(folder: Path) -> Drive:
    drive = Drive(folder, [sys.executable, "-c", RANK])
    drive.pid(KINDS["loader"])
    return drive


def bound_seconds(kind: str, name: str) -> float:
    """Return the seconds from a fault to the end of all: 1.5 times the promise."""
    if name == "STOP" and kind in ("rank", "shim", "torchrun"):
        return BUSY * (HANG_SECONDS + 10.0)
    if name == "STOP":
        return BUSY * (LEASE_SECONDS + 5.0)
    return BUSY * (5.0 + (CHECKPOINT_SECONDS if kind == "launcher" and name != "KILL" else 0.0))


LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in ("rank", "torchrun")]


SHORT_RUN, REST = SIGNALS[::3], (*SIGNALS[1:3], *SIGNALS[4:])
HALVES = [SHORT_RUN, pytest.param(REST, marks=pytest.mark.long)]


@pytest.mark.parametrize("kind", ["shim", "agent", "launcher", *LONG])
@pytest.mark.parametrize("names", HALVES, ids="-".join)
def test_nothing_survives(tmp_path, kind, names):
    """Each process of a run gets each signal: nothing is left in time, codes are true."""
    drives = {name: start(tmp_path) for name in names}
    hurt_at = {}
    for name, drive in drives.items():
        os.kill(pid_of(drive, kind), signal.Signals[f"SIG{name}"])
        hurt_at[name] = time.monotonic()
    for name, drive in sorted(drives.items(), key=lambda pair: pair[0] == "STOP"):
        left = hurt_at[name] + bound_seconds(kind, name) - time.monotonic()
        until(lambda drive=drive: not drive.alive(), seconds=left)
        if kind == "launcher" and name == "STOP":
            os.kill(drive.process.pid, signal.SIGCONT)
            assert drive.wait() == 75, drive.err  # it woke up to a run that is gone
        elif kind != "launcher" or name != "KILL":
            assert drive.wait() == CODES[kind][name], (name, drive.err)
            assert set(drive.result["hosts"].values()) == {"clean"}, (name, drive.err)
        else:
            assert drive.wait() == -signal.SIGKILL


@pytest.mark.parametrize("names", HALVES, ids="-".join)
def test_a_loader_that_dies_is_the_business_of_its_rank(tmp_path, names):
    """A child of a rank gets each signal: the run goes on, and nothing is left when it is ended."""
    drives = {name: start(tmp_path) for name in names}
    for name, drive in drives.items():
        os.kill(pid_of(drive, "loader"), signal.Signals[f"SIG{name}"])
    for drive in drives.values():
        assert KINDS["rank"] in " ".join(drive.alive().values())
        drive.process.terminate()
    for drive in drives.values():
        assert drive.wait() == 143
        assert not drive.alive()


def test_a_guard_ignores_signals_and_its_end_is_noticed(tmp_path):
    """The agent's guard takes no signal but KILL, which ends the run; stopped, it goes with it."""
    first, second = start(tmp_path), start(tmp_path)
    for name in ("TERM", "INT", "HUP", "STOP"):
        os.kill(pid_of(first, "guard"), signal.Signals[f"SIG{name}"])
    os.kill(pid_of(second, "guard"), signal.SIGKILL)
    assert second.wait() == 75
    assert second.result["cause"] == "the guard of the agent was killed"
    assert KINDS["rank"] in " ".join(first.alive().values())
    first.process.terminate()
    assert first.wait() == 143
    for drive in (first, second):
        assert set(drive.result["hosts"].values()) == {"clean"}
        until(lambda drive=drive: not drive.alive(), seconds=5.0)


def test_agent_and_torchrun_killed_at_once_leave_nothing(tmp_path):
    """Agent, torchrun and launcher die of SIGKILL in the same moment: the shims clean up."""
    drive = start(tmp_path)
    scratch = Path(drive.plan["hosts"][0]["scratch"])
    pids = [pid_of(drive, kind) for kind in ("torchrun", "agent", "launcher")]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not drive.alive(), seconds=BUSY * 5.0)
    assert not scratch.exists()
    drive.wait()


def test_a_daemon_of_a_rank_dies_with_the_agent(tmp_path):
    """A rank's daemon (two forks, own session) is gone after the agent got SIGKILL."""
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: os.execvp('sleep', ['sleep', '98765'])\n"
        "    os._exit(0)\n"
        "os.wait(); time.sleep(98764)\n"
    )
    drive = Drive(tmp_path, [sys.executable, "-c", code])
    drive.pid("sleep 98765")
    os.kill(pid_of(drive, "agent"), signal.SIGKILL)
    assert drive.wait() == 75
    assert not drive.alive()


def test_a_decoy_survives(tmp_path):
    """A process with the same command line and user, but not of the run, is left alone."""
    command = [sys.executable, "-c", RANK]
    with subprocess.Popen(command, start_new_session=True) as decoy:
        try:
            for kind in ("rank", "torchrun", "agent"):
                drive = start(tmp_path)
                os.kill(pid_of(drive, kind), signal.SIGKILL)
                drive.wait()
                assert not drive.alive()
            assert decoy.poll() is None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(decoy.pid, signal.SIGKILL)


def test_the_private_folder_of_an_agent_is_gone_as_well(tmp_path):
    """Sockets and pipes under /tmp go with the run, also when the agent was killed."""
    drive = start(tmp_path)
    scratch = Path(until(lambda: drive.plan["hosts"][0]["scratch"]))
    assert scratch.stat().st_mode & 0o777 == 0o700
    os.kill(pid_of(drive, "agent"), signal.SIGKILL)
    drive.wait()
    assert not scratch.exists()


def test_the_same_launch_works_again_at_once(tmp_path):
    """After a killed launcher the next launch starts at once, and says what became of the last."""
    first, second = start(tmp_path), start(tmp_path)
    second.process.kill()
    second.wait()
    third = Drive(tmp_path, ["true"])
    assert third.wait() == 0
    assert f"{second.folder} has no result: its launcher was killed" in third.err
    assert "no result" not in Drive(tmp_path, ["true"]).end().err
    until(lambda: not second.alive(), seconds=BUSY * 5.0)
    first.process.terminate()
    assert "no result" not in first.end().err
