"""What only a real torchrun can show: its rendezvous, its peers' noise, its exit barrier."""

import os
import signal
from pathlib import Path

from tests.lab import warm
from tests.lab.waiting import until
from tests.launcher.drive import Drive

GLOO = (
    "import os, sys, time\n"
    "import torch, torch.distributed as dist\n"
    "rank = int(os.environ['RANK'])\n"
    "dist.init_process_group('gloo')\n"
    "one = torch.ones(1)\n"
)


def python(code: str) -> list[str]:
    return [str(warm.interpreter()), "-c", GLOO + code]


def drive_of(folder: Path, command: list[str], slots: list[int]) -> Drive:
    """Start a launcher with real torchruns, whose imports are done."""
    return Drive(folder, command, slots=slots, real=True, python=str(warm.interpreter()))


def nothing_is_left(drive: Drive) -> None:
    """Wait for the shims, which end by themselves once their agent has.

    They are children of a torchrun that the warm server has forked, so no agent sees them as its
    own descendants and waits for their end, as it does for those of the other tests.
    """
    until(lambda: not drive.alive(), seconds=10.0)


def test_ranks_know_who_they_are(tmp_path, monkeypatch):
    """Hosts with 2 and 1 slots: ranks, world size, threads and an all-reduce are right."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    code = (
        "one *= rank + 1\n"
        "dist.all_reduce(one)\n"
        "assert os.environ['WORLD_SIZE'] == os.environ['RACKRUN_WORLD_SIZE']\n"
        "print(rank, int(one), os.environ['OMP_NUM_THREADS'])\n"
        "sys.stdout.flush(); dist.destroy_process_group(); os._exit(0)"
    )
    drive = drive_of(tmp_path, python(code), [2, 1])
    assert drive.wait() == 0, drive.err
    assert drive.log(0, "out").read_text() == "0 6 1\n"
    assert drive.log(1, "out").read_text() == "1 6 1\n"
    assert drive.log(2, "out", host=1).read_text() == "2 6 2\n"
    nothing_is_left(drive)


ENDLESS = (
    "print('ready', os.getpid(), flush=True)\n"
    "for step in range(10**9):\n"
    "    dist.all_reduce(one)\n"
    "    if step == 50 and rank == %s: %s\n"
    "    time.sleep(0.01)\n"
)


def one_is_the_cause(drive: Drive, rank: int, cause: str) -> None:
    """Check that one rank is named with host and log, and that its peers' noise is not shown."""
    assert (drive.result["rank"], drive.result["host"]) == (rank, f"127.0.0.{2 + rank}")
    last = drive.err.splitlines()[-1]
    assert f"failed: rank {rank} on 127.0.0.{2 + rank}: {cause}; log: " in last
    assert "Connection closed" not in drive.out + drive.err
    nothing_is_left(drive)


def test_the_rank_that_was_killed_is_the_cause_and_not_its_peers(tmp_path):
    """Rank 0, at whose host the others meet, gets SIGKILL in an all-reduce: it is named."""
    drive = drive_of(tmp_path, python(ENDLESS % (-1, "pass")), [1, 1])
    log = drive.log(0, "out")
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    os.kill(int(log.read_text().split()[1]), signal.SIGKILL)
    assert drive.wait() == 137
    assert "Traceback" not in drive.out + drive.err
    one_is_the_cause(drive, 0, "killed by SIGKILL")


def test_the_exception_of_one_rank_is_shown_once_and_not_its_peers(tmp_path):
    """One rank of two hosts raises between two all-reduces: its traceback once, with advice."""
    error = "torch.OutOfMemoryError('CUDA out of memory. Tried 2 GiB.')"
    drive = drive_of(tmp_path, python(ENDLESS % (1, f"raise {error}")), [1, 1])
    assert drive.wait() == 1, drive.err
    assert (drive.out + drive.err).count("Traceback") == 1
    one_is_the_cause(drive, 1, "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB.")
    assert "a smaller --batch-size" in drive.err.splitlines()[-1]


def test_a_torchrun_in_its_exit_barrier_is_ended(tmp_path):
    """One host is done and its torchrun waits for the other, deaf to SIGTERM: gone all the same."""
    code = "os._exit(0) if rank == 0 else print('alone', flush=True) or time.sleep(98764)"
    drive = drive_of(tmp_path, python(code), [1, 1])
    until(lambda: drive.log(1, "out", host=1).exists())
    until(lambda: len([line for line in drive.alive().values() if "/agent.zip" in line]) == 3)
    drive.process.terminate()
    assert drive.wait() == 143
    assert drive.result["codes"]["0"] == 0
    nothing_is_left(drive)
