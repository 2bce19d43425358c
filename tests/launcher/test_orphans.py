"""Nothing survives, whatever dies: every process of a run, times every signal."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.drive import Drive, until

SIGNALS = ("KILL", "TERM", "INT", "STOP", "HUP")
BOUND_SECONDS = 3.0 + 5.0 + 20.0  # the lease, the promise, and a slow machine

RANK = (  # with a child as a loader worker would be, which knows nothing of all this
    "import os, time\n"
    "if os.fork() == 0:\n"
    "    os.execvp('sleep', ['sleep', '98765'])\n"
    "time.sleep(98764)\n"
)
KINDS = {
    "rank": "time.sleep(98764)",
    "loader": "sleep 98765",
    "shim": "/agent.py",
    "torchrun": "fake_torchrun.py",
    "agent": "rackrun_agent",
}
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


def pid_of(drive: Drive, kind: str) -> int:
    if kind == "launcher":
        return drive.process.pid
    lines = drive.alive()
    return next(
        pid
        for pid, line in lines.items()
        if KINDS[kind] in line and (kind != "shim" or "fake_torchrun" not in line)
    )


def nothing_is_left(drive: Drive) -> None:
    until(lambda: not drive.alive(), BOUND_SECONDS)


@pytest.mark.parametrize("kind", ["rank", "shim", "torchrun", "agent", "launcher"])
def test_nothing_survives(tmp_path: Path, kind: str) -> None:
    """Each process of a run gets each signal: nothing is left after lease + 5 s, codes are true."""
    drives = {name: start(tmp_path) for name in SIGNALS}
    for name, drive in drives.items():
        os.kill(pid_of(drive, kind), signal.Signals[f"SIG{name}"])
    for name, drive in drives.items():
        nothing_is_left(drive)
        if kind == "launcher" and name == "STOP":
            os.kill(drive.process.pid, signal.SIGCONT)
            assert drive.wait() == 75, drive.err  # it woke up to a run that is gone
        elif kind != "launcher" or name != "KILL":
            assert drive.wait() == CODES[kind][name], (name, drive.err)
            assert set(drive.result["hosts"].values()) == {"clean"}, (name, drive.err)
        else:
            assert drive.wait() == -signal.SIGKILL


def test_a_loader_that_dies_is_the_business_of_its_rank(tmp_path: Path) -> None:
    """A child of a rank gets each signal: the run goes on, and nothing is left when it is ended."""
    drives = {name: start(tmp_path) for name in SIGNALS}
    for name, drive in drives.items():
        os.kill(pid_of(drive, "loader"), signal.Signals[f"SIG{name}"])
    for drive in drives.values():
        assert KINDS["rank"] in " ".join(drive.alive().values())
        drive.process.terminate()
    for drive in drives.values():
        assert drive.wait() == 143
        assert not drive.alive()


def test_agent_and_torchrun_killed_at_once_leave_nothing(tmp_path: Path) -> None:
    """Agent, torchrun and launcher die of SIGKILL in the same moment: the shims clean up."""
    drive = start(tmp_path)
    scratch = Path(drive.plan["hosts"][0]["scratch"])
    pids = [pid_of(drive, kind) for kind in ("torchrun", "agent", "launcher")]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    nothing_is_left(drive)
    assert not scratch.exists()
    drive.wait()


def test_a_daemon_of_a_rank_dies_with_the_agent(tmp_path: Path) -> None:
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
    os.kill(drive.pid("rackrun_agent"), signal.SIGKILL)
    assert drive.wait() == 75
    assert not drive.alive()


def test_a_decoy_survives(tmp_path: Path) -> None:
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


def test_the_private_folder_of_an_agent_is_gone_as_well(tmp_path: Path) -> None:
    """Sockets and pipes under /tmp go with the run, also when the agent was killed."""
    drive = start(tmp_path)
    scratch = Path(until(lambda: drive.plan["hosts"][0]["scratch"]))
    assert scratch.stat().st_mode & 0o777 == 0o700
    os.kill(pid_of(drive, "agent"), signal.SIGKILL)
    drive.wait()
    assert not scratch.exists()


def test_the_same_launch_works_again_at_once(tmp_path: Path) -> None:
    """After a killed launcher the next launch starts at once, and says what became of the last."""
    first, second = start(tmp_path), start(tmp_path)
    second.process.kill()
    second.wait()
    third = Drive(tmp_path, ["true"])
    assert third.wait() == 0
    assert f"{second.folder} has no result: its launcher was killed" in third.err
    assert "no result" not in Drive(tmp_path, ["true"]).end().err
    nothing_is_left(second)
    first.process.terminate()
    assert "no result" not in first.end().err
