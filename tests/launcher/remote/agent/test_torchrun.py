"""What only a real torchrun can show: its rendezvous, its peers' noise, its exit barrier."""

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
