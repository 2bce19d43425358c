"""How a run can end: the true exit code, the true cause, and nothing left."""

import os
import re
import selectors
import signal
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


def ended(tmp_path: Path, code: str, **options: object) -> Drive:
    drive = Drive(tmp_path, python(code), **options)
    drive.code = drive.wait()
    assert not drive.alive()
    return drive


def test_a_run_whose_ranks_all_end_well_is_done(tmp_path):
    """All ranks of all hosts end with 0: so does the launcher, and every host is clean."""
    drive = ended(tmp_path, "print('hello from', rank)", slots=[2, 2])
    assert drive.code == 0
    assert drive.result["verdict"] == "done"
    assert drive.result["codes"] == {"0": 0, "1": 0, "2": 0, "3": 0}
    assert set(drive.result["hosts"].values()) == {"clean"}
    assert drive.log(3, "out", host=1).read_text() == "hello from 3\n"
    assert drive.err.splitlines()[-1].startswith("rackrun: done in ")


@pytest.mark.parametrize(
    ("code", "exit_code", "cause"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        pytest.param(
            *("raise ValueError('a bad value')", 1, "ValueError: a bad value"),
            marks=pytest.mark.long,
        ),
        ("print('error: no such shard', file=sys.stderr); sys.exit(65)", 65, "no such shard"),
        pytest.param("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL", marks=pytest.mark.long),
        ("import ctypes; ctypes.string_at(0)", 139, r"killed by SIGSEGV at .*ctypes.*in string_at"),
        pytest.param(
            *("os.abort()", 134, "killed by SIGABRT at <string>:3 in <module>"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_exit_code_is_that_of_the_rank(tmp_path, code, exit_code, cause):
    """A rank fails while its peer would run on: code, cause, host, rank and log are right."""
    drive = ended(tmp_path, f"if rank == 0: time.sleep(999)\n{code}", slots=[2])
    result = drive.result
    assert drive.code == result["exit_code"] == exit_code
    assert re.fullmatch(cause, result["cause"])
    assert (result["host"], result["rank"]) == ("127.0.0.2", 1)
    last = drive.err.splitlines()[-1]
    assert "rank 1 on 127.0.0.2" in last
    assert "/logs/127.0.0.2" in last


def test_a_traceback_is_shown_once(tmp_path):
    """The traceback of the true cause is on the screen once; the log has it as it was."""
    drive = ended(tmp_path, "raise ValueError('a bad value')", slots=[3])
    assert (drive.out + drive.err).count("Traceback") == 1
    assert drive.log(drive.result["rank"], "err").read_text().count("Traceback") == 1


def test_a_peer_that_lost_its_connection_is_not_the_cause(tmp_path):
    """A rank is slow to die of its exception, its peer is quick to miss it: the former is named."""
    code = (
        "import atexit, traceback\n"
        "if rank: atexit.register(time.sleep, 999); raise KeyError('the true one')\n"
        "while not os.path.exists(os.environ['RACKRUN_RUN_FOLDER'] + '/logs/127.0.0.2/rank-1.err')"
        ": time.sleep(0.01)\n"
        "raise RuntimeError('Connection closed by peer [127.0.0.1]:1')\n"
    )
    drive = ended(tmp_path, code, slots=[2])
    assert drive.result["cause"] == "KeyError: 'the true one'"


def test_a_command_that_does_not_exist_is_named(tmp_path):
    """A typing error in the command is reported in one line, with the shell's code."""
    drive = Drive(tmp_path, ["no-such-program"])
    assert drive.wait() == 127
    assert drive.result["cause"] == "cannot start no-such-program: No such file or directory"


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(tmp_path):
    """A rank that ignores SIGTERM, INT and HUP lives for the grace, and no longer."""
    code = (
        "import signal\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "if rank: time.sleep(0.5); sys.exit(9)\n"
        "time.sleep(999)"
    )
    drive = ended(tmp_path, code, slots=[2])
    assert drive.code == 9
    assert drive.result["codes"] == {"0": 128 + signal.SIGKILL, "1": 9}
    assert drive.result["seconds"] < BUSY * (3.0 + 1.0) + 5.0  # the promise, the grace; the start


def test_what_ranks_start_and_forget_ends_with_them(tmp_path):
    """A daemon that a rank made with two forks and a new session is gone after the run."""
    code = (
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(999)\n"
        "    os._exit(0)\n"
        "time.sleep(0.2)"
    )
    assert ended(tmp_path, code).code == 0


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


def test_a_rank_that_the_kernel_kills_for_memory_is_named(tmp_path, cramped):
    """A rank outgrows its memory: 137, the cause is memory, and what may help is said."""
    code = f"open('{cramped}/cgroup.procs', 'w').write(str(os.getpid())); b'x' * 300_000_000"
    drive = ended(tmp_path, f"if rank == 0: time.sleep(999)\n{code}", slots=[2])
    assert drive.code == 137
    assert drive.result["cause"] == "killed by SIGKILL: the host is out of memory"
    assert "a smaller --batch-size" in drive.err.splitlines()[-1]


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


LONG = (
    "import pathlib, traceback\n"
    "lost = pathlib.Path('lost')\n"
    "if rank == 1:\n"
    "    while not lost.exists(): time.sleep(0.01)\n"
    "    raise ConnectionResetError('Connection closed by peer')\n"
    "try: raise ValueError('x' * 200_000 + '\\n' + 'the end' * 30_000)\n"
    "except ValueError: traceback.print_exc()\n"
    "lost.touch(); time.sleep(999)\n"
)


def test_an_exception_with_a_long_message_keeps_its_type_and_its_blame(tmp_path):
    """Rank 0 prints 400 kB and lingers; rank 1, which lost it, ends first: rank 0 is named."""
    drive = ended(tmp_path, LONG, slots=[2])
    assert (drive.code, drive.result["rank"]) == (1, 0), drive.err
    assert drive.result["cause"].startswith("ValueError: xxx")
    assert len(drive.result["cause"]) < 1100
    assert 'File "<string>"' in drive.result["traceback"]


def test_a_rank_that_left_too_early_is_named_beside_the_one_that_lost_it(tmp_path):
    """Rank 0 ends with 0 amid the run; rank 1 loses its connection, and that is said of it."""
    code = (
        "if rank == 0: os._exit(0)\n"
        "time.sleep(0.5)\n"
        "raise ConnectionResetError('Connection closed by peer')\n"
    )
    drive = ended(tmp_path, code, slots=[1, 1])
    assert (drive.code, drive.result["rank"]) == (1, 1)
    text = "Connection closed by peer; rank 0 on 127.0.0.2 had ended with 0"
    assert drive.result["cause"] == f"ConnectionResetError: {text}"


def test_sigterm_is_called_by_its_name(tmp_path):
    """A scheduler's signal is no Ctrl-C, and is not answered as one."""
    drive = Drive(tmp_path, python("print('up', flush=True); time.sleep(999)"))
    until(drive.log(0, "out").exists)
    drive.process.send_signal(signal.SIGTERM)
    assert drive.wait() == 143
    assert "rackrun: stopping: SIGTERM\n" in drive.err
    assert "Ctrl-C" not in drive.err


def test_a_rank_may_end_before_the_others(tmp_path):
    """Uneven data: the first rank is done at once, the other goes on and ends well."""
    drive = ended(tmp_path, "if rank: time.sleep(2); print('last')", slots=[1, 1])
    assert drive.code == 0
    assert "last" in drive.out


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


def test_a_host_that_cannot_prepare_is_refused(tmp_path):
    """A working directory that is not there ends the run with 78 before anything starts."""
    drive = Drive(tmp_path, ["true"], workdir="/no/such/folder")
    assert drive.wait() == 78
    assert "no folder /no/such/folder on this host" in drive.result["cause"]


def test_torchrun_that_dies_takes_its_ranks_along(tmp_path):
    """torchrun killed -9: the run ends with 75, names torchrun, and no rank is left."""
    drive = Drive(tmp_path, python("time.sleep(999)"), slots=[2])
    until(lambda: len([line for line in drive.alive().values() if "time.sleep(999)" in line]) == 2)
    os.kill(drive.pid("fake_torchrun"), signal.SIGKILL)
    assert drive.wait() == 75
    assert drive.result["cause"] == "torchrun was killed by SIGKILL"
    assert not drive.alive()
