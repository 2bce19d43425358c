"""Ranks that a server forks: like those that start afresh, and nothing of them survives."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rackrun.launcher.run.job import Command, TaskWork
from tests.launcher.drive import Drive
from tests.launcher.remote.agent.test_orphans import HALVES, KINDS, RANK, bound_seconds, pid_of
from tests.waiting import until

FACTS = """\
import ctypes, faulthandler, json, os, signal, sys
from pathlib import Path

death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
own = ("RUN_ID", "RUN_FOLDER", "REPORTS", "MASTER_PORT", "RUN_CANARY")  # of this run alone

def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False

print(json.dumps({
    "argv": sys.argv[1:],
    "script": sys.argv[0],
    "command line": Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode().split("\\0"),
    "main": [__name__, __spec__.name, vars(sys.modules["__main__"]) is globals()],
    "folders": [os.getcwd(), sys.path[0]],
    "environment": {name: value for name, value in os.environ.items() if not name.endswith(own)},
    "streams": [os.readlink("/proc/self/fd/0"), type(sys.stdout.buffer).__name__,
                sys.stdout.write_through, sys.stdout.encoding, sys.stderr.errors],
    "descriptors": [number for number in range(99) if is_open(number)],
    "signals": {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "wakeup": signal.set_wakeup_fd(-1),
    "dies with its parent": death.value,
    "session": os.getsid(0) == os.getpid(),
    "stacks": faulthandler.is_enabled(),
    "of the launcher": [name for name in sys.modules if name.startswith("launcher")],
    "importable": len([finder for finder in sys.meta_path if "Bundle" in repr(finder)]),
}))
"""
ENDS = {
    "import os; os._exit(7)": 7,
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": 128 + signal.SIGSEGV,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": 128 + signal.SIGKILL,
    "import no_such_module": 1,
    "import os; os.kill(os.getppid(), 9); import time; time.sleep(60)": 128 + signal.SIGKILL,
}


def start(folder: Path, code: str, *preload: str, words: tuple[str, ...] = ()) -> Drive:
    """Launch a rank that runs a module of its own, forked once these modules are imported."""
    (folder / "rank.py").write_text(code)
    command = ["python3", "-u", "-m", "rank", *words]
    return Drive(folder, command, preload=[*preload], workdir=str(folder))


def facts(drive: Drive) -> dict[str, Any]:
    """Return what the rank has found."""
    assert drive.wait() == 0, drive.err
    return dict(json.loads(drive.log(0, "out").read_text()))


def test_a_forked_rank_is_what_a_fresh_python_would_be(tmp_path: Path) -> None:
    """Words, folders, variables, streams, signals, descriptors: all are the same."""
    args = ("--data", "a b", "$HOME", "")
    forked, fresh = (
        facts(start(tmp_path, FACTS, *preload, words=args)) for preload in (("json",), ())
    )
    assert forked == fresh
    assert forked["argv"] == list(args)
    assert forked["descriptors"] == [0, 1, 2]


def test_a_user_s_own_code_is_imported_by_the_ranks_alone() -> None:
    """The server imports the models of tasks in the table, and of others what all need."""
    common = ("rackrun.training.loop", "torch._dynamo")
    assert TaskWork("classify").preload == (*common, "rackrun.training.tasks.classify.model")
    assert TaskWork("own/task.py").preload == TaskWork("own.task").preload == common
    assert Command(("python", "train.py")).preload == ()


@pytest.mark.parametrize("code", ENDS)
def test_the_end_of_a_forked_rank_is_its_own(tmp_path: Path, code: str) -> None:
    """Exit codes and signals pass the parent and the shim, and tracebacks get into the log."""
    drive = start(tmp_path, code, "json")
    assert drive.wait() == ENDS[code], drive.err
    assert set(drive.result["hosts"].values()) == {"clean"}
    if "no_such" in code:
        assert "No module named 'no_such_module'" in drive.log(0, "err").read_text()


@pytest.mark.parametrize("code", ["import no_such", "import threading as t; t.Event().wait(0)\n"])
def test_where_the_server_is_of_no_use_ranks_start_afresh(tmp_path: Path, code: str) -> None:
    """A module that cannot be imported, or that starts a thread, costs a rank its fork only."""
    wait = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    (tmp_path / "hostile.py").write_text(wait if "thread" in code else code)
    parent = "import os; print(open(f'/proc/{os.getppid()}/cmdline').read())"
    drive = start(tmp_path, parent, "hostile")
    assert drive.wait() == 0, drive.err
    shim = drive.log(0, "out").read_text()
    assert "/agent.py" in shim
    assert "rank_server" not in shim


@pytest.mark.parametrize("kind", ["rank", "loader", "shim", "parent"])
@pytest.mark.parametrize("names", HALVES, ids="-".join)
def test_nothing_survives_of_a_forked_rank(
    tmp_path: Path, kind: str, names: tuple[str, ...]
) -> None:
    """Each process of a rank gets each signal: nothing is left in time, and the codes are true."""
    codes = {"rank": {"KILL": 137, "TERM": 143, "INT": 130, "HUP": 129}, "parent": {"KILL": 137}}
    codes["shim"] = codes["parent"]
    drives = {name: start(tmp_path, RANK, "json") for name in names}
    for name, drive in drives.items():
        drive.pid(KINDS["loader"])
        os.kill(pid_in(drive, kind), signal.Signals[f"SIG{name}"])
    hurt_at = time.monotonic()
    for name, drive in sorted(drives.items(), key=lambda pair: pair[0] == "STOP"):
        if kind == "loader" or (kind == "parent" and name not in ("KILL", "STOP")):
            assert "-m rank" in " ".join(drive.alive().values())  # it is none of our business
            drive.process.terminate()
        left = hurt_at + bound_seconds("rank", name) - time.monotonic()
        until(lambda drive=drive: not drive.alive(), seconds=max(left, 5.0))
        code = 143 if kind in ("loader", "parent") else 75
        code = 75 if name == "STOP" and kind != "loader" else code
        assert drive.wait() == codes.get(kind, {}).get(name, code), (name, drive.err)
        assert set(drive.result["hosts"].values()) == {"clean"}, (name, drive.err)


def pid_in(drive: Drive, kind: str) -> int:
    """Return the process id of a process of a forked rank."""
    if kind in ("loader", "shim"):
        return pid_of(drive, kind)
    rank = drive.pid("-m rank")
    parent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    assert "rank_server" in drive.alive()[parent]
    return rank if kind == "rank" else parent
