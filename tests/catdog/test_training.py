"""`python -m rackrun.catdog` as a user types it: codes, lines, signals, and no process left."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.lab import warm

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 30.0
TINY = "--image-size 32 --width 4 --batch-size 8 --device cpu --no-tensorboard"


def environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def catdog(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return warm.run("-m", "rackrun.catdog", *args, cwd=cwd, env=environment())


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a few drawn cats and dogs as shards."""
    folder = tmp_path_factory.mktemp("demo")
    done = catdog("demo", str(folder), "--images", "60", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "shards"


def test_a_killed_loader_worker_ends_the_run_by_name(shards, tmp_path):
    """As when the memory is full: one line that says so, and no semaphore, no socket left.

    The worker is no child of the rank, whose threads make forks of it unsafe.
    """
    with long_run(shards, tmp_path) as rank:
        assert rank.stdout and rank.stderr
        # The oldest one: in an evaluation, which has workers of its own, there is a second.
        worker = min(pid for pid, name in session(rank.pid).items() if name == "pt_data_worker")
        assert stat(worker)[1] != str(rank.pid)
        os.kill(worker, signal.SIGKILL)
        threading.Thread(target=rank.stdout.read).start()
        complaint = rank.stderr.read()
        assert rank.wait() == 70
        wait_for_end(rank.pid)
    assert complaint.startswith(f"error: a loader worker (pid {worker}) was killed by SIGKILL;")
    assert len(complaint.splitlines()) == 1
    assert not list((tmp_path / "tmp").glob("pymp-*"))


def test_nothing_outlives_a_killed_rank(shards, tmp_path):
    """Its workers and their server notice that it has ended, and have nothing to say about it."""
    with long_run(shards, tmp_path) as rank:
        assert rank.stdout and rank.stderr
        assert len(session(rank.pid)) > 2
        rank.kill()
        rank.wait()
        wait_for_end(rank.pid)
        assert rank.stderr.read() == ""


@contextmanager
def long_run(shards: Path, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Yield a run in its second epoch, in a session of its own; end what is left of it."""
    short = tempfile.mkdtemp()  # the path of a socket has 107 bytes
    (folder / "tmp").symlink_to(short)
    rank = warm.Python(
        *(
            "-m",
            "rackrun.catdog",
            "--data",
            shards,
            "--workers",
            "1",
            *TINY.split(),
            "--epochs",
            "500",
        ),
        cwd=folder,
        env={**environment(), "TMPDIR": short},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with rank:
        try:
            assert rank.stdout
            while "epoch 2/500" not in rank.stdout.readline():
                assert rank.poll() is None
            yield rank
        finally:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)


def session(leader: int) -> dict[int, str]:
    """Return the processes that live in a session, by number: their names."""
    names = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, sid = stat(int(entry.name))
            if int(sid) == leader and state != "Z":
                names[int(entry.name)] = (entry / "comm").read_text().strip()
    return names


def stat(pid: int) -> list[str]:
    """Return state, parent, group and session of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]


def wait_for_end(leader: int) -> None:
    """Wait until a session has no process."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while left := session(leader):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
