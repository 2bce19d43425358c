"""A host or a rank is lost in the middle of an epoch: the run goes on, epochs stay exact."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from rackrun.contract.variables import NOTE_ROWS
from rackrun.run_folder import RunFolder
from rackrun.training import checkpoint
from rackrun.training.checkpoint import steps_in
from tests.lab import warm
from tests.lab.hosts import free_port
from tests.lab.network import NetLab, net_labs
from tests.lab.oracles import exact_epochs
from tests.lab.ranks import codes, exact_ranks
from tests.lab.waiting import until

EPOCHS, STEPS = 10, 10  # of 200 samples
OPTIONS = (
    "--image-size", "24", "--width", "8", "--crop-area", "0.8", "--label-smoothing", "0",
    "--ema-decay", "0", "--optimizer", "adamw", "--lr", "0.01", "--warmup-epochs", "1",
    "--epochs", str(EPOCHS), "--global-batch", "20", "--exact-epochs",
    "--save-steps", "4", "--keep-checkpoints", "99", "--workers", "0", "--device", "cpu",
    "--no-tensorboard",
)  # fmt: skip
TASK = ("catdog", "--data", "shards", "--lr-schedule", "gates:cosine", *OPTIONS)
CUTS = (35, 75)
"""Steps at which attempts wait until a cable is pulled, however fast they are."""
GATES = """
import math
import time
from pathlib import Path


def cosine(step: int, steps: int) -> float:
    for number, cut in enumerate({cuts}, start=1):
        while step + 10 >= cut and not Path("{folder}/cut-" + str(number)).exists():
            Path("{folder}/waits-" + str(number)).touch()
            time.sleep(0.02)
    return 0.5 * (1 + math.cos(math.pi * step / steps))
"""
"""A schedule of the learning rate, after a warm-up of 10 steps."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SHORT = (
    "--lease-seconds", "3", "--max-restarts", "2", "--name", "net",
    "--env", "OMP_NUM_THREADS=1", "--env", f"{NOTE_ROWS}=1",
)  # fmt: skip
SECONDS = 240


@pytest.fixture
def net(tmp_path: Path, shapes: Path) -> Iterator[Callable[[int], NetLab]]:
    """Yield `net(3)`, which makes three hosts behind cables, each with its own working folder."""
    with net_labs(tmp_path / "lab") as make:

        def make_with_disks(count: int) -> NetLab:
            lab = make(count)
            gates = GATES.format(cuts=CUTS, folder=lab.folder)
            (lab.folder / "gates.py").write_text(gates)
            for number in range(1, count + 1):
                disk(lab, number).mkdir()
                (disk(lab, number) / "shards").symlink_to(shapes)
                (disk(lab, number) / "gates.py").write_text(gates)
            return lab

        yield make_with_disks


def disk(lab: NetLab, number: int) -> Path:
    """Return the working folder of a host, which no other host sees."""
    return lab.folder / f"disk-{number}"


def hosts(lab: NetLab, python: Path) -> str:
    settings = [f"python={python} workdir={disk(lab, n + 1)}" for n in range(len(lab.hosts))]
    return str(lab.write_hosts(*settings))


def attempts(lab: NetLab, number: int) -> list[RunFolder]:
    """Return the runs that a host took part in, in order."""
    return [RunFolder(path) for path in sorted(disk(lab, number).glob("runs/*-net*"))]


def cut_off(process: "subprocess.Popen[str]", lab: NetLab, number: int, attempt: int) -> None:
    """Pull a host's cable as soon as this attempt waits for that."""

    def waits() -> bool:
        assert process.poll() is None, process.communicate()
        return (lab.folder / f"waits-{attempt}").exists()

    until(waits, f"attempt {attempt} waits", SECONDS)
    lab.pull_cable(number)
    (lab.folder / f"cut-{attempt}").touch()


def exact(lab: NetLab, last: RunFolder) -> list[int]:
    """Check that every epoch is the data set; return the world sizes, in order."""
    runs = [run.path for number in range(1, len(lab.hosts) + 1) for run in attempts(lab, number)]
    epochs = exact_epochs(*runs, last.path)
    assert len(epochs) == EPOCHS
    return [world for world, _ in groupby(world for worlds in epochs for world in worlds)]


def trained_in_peace(shapes: Path, run: Path, ranks: int) -> RunFolder:
    """Return an undisturbed run of this many ranks."""
    port = str(free_port("127.0.0.1"))
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    world["PYTHONPATH"] = os.fspath(run.with_name("lab"))
    task = ("--data", str(shapes), *TASK[3:])
    args = (warm.interpreter(), "-m", "rackrun.catdog", *task, "--run-folder", run)
    job = [
        subprocess.Popen(args, env={**os.environ, **ONE_THREAD, **world, "RANK": str(rank)})
        for rank in range(ranks)
    ]
    assert [rank.wait(SECONDS) for rank in job] == [0] * ranks
    return RunFolder(run)


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = checkpoint.read(run.final)["model"]
    return result


def test_a_spare_takes_over(net, shapes, tmp_path):
    """One of two hosts is cut off in mid-epoch; a third, new to the run, takes its place: every
    epoch is the data set, and the weights are, bit for bit, those of two ranks to which nothing
    happened. The rank that is left waits in an exchange, and has saved its last step, 35, although
    only every fourth is due; batch norms go on from the statistics of that rank."""
    lab = net(3)
    (lab.folder / "cut-2").touch()
    process = lab.run_ssh(*SHORT, "--spares", "1", hosts(lab, lab.cheap_python(trains=True)), *TASK)
    cut_off(process, lab, 2, attempt=1)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert out.count("resumed after step") == out.count("resumed after step 35 ") == 1
    went_on = attempts(lab, 1)[-1]
    assert exact(lab, went_on) == [2]
    calm = weights(trained_in_peace(shapes, tmp_path / "calm", ranks=2))
    assert same_weights(weights(went_on), calm)


SMALL = {"global_batch": 12, "batch_size": 6, "save_steps": 2, "keep_checkpoints": 99}


def two_ranks(data: Path, run: Path, misdeed: str = "", **options: Any) -> list[int]:
    """Train on two ranks; return their exit codes. One that stops itself is killed at the end."""
    ranks = exact_ranks(data, [run, run], misdeed=misdeed, **{**SMALL, **options})
    if misdeed == STOPPED:
        first, stopped = ranks
        until(lambda: state_of(stopped.pid) == "T", "a rank stops itself", SECONDS)
        time.sleep(2)  # the other one is in the exchange by now
        first.terminate()  # as the launcher would, which has missed the heartbeats of its host
        first.communicate(timeout=SECONDS)
        stopped.kill()
    return codes(ranks)


def state_of(pid: int) -> str:
    """Return the state of a process, as /proc has it; T: stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


KILLED = f"1,4,{int(signal.SIGKILL)}"
WRITER_KILLED = f"0,4,{int(signal.SIGKILL)}"
STOPPED = f"1,4,{int(signal.SIGSTOP)}"


def test_survivors_of_a_lost_rank_keep_the_last_whole_step(make_shards, tmp_path):
    """A rank is killed in step 4, of which the other has run its forward pass: it saves step 3,
    long before a save is due, with the weights of two ranks to which nothing happened. A restart
    passes a spoiled copy over, goes on there, and ends with their weights; every epoch is exact."""
    data = make_shards(train=(20, 20, 12), val=(8, 5))  # norms of one image use their statistics
    calm, first, second = (RunFolder(tmp_path / name) for name in ("calm", "first", "second"))
    assert two_ranks(data, calm.path, save_steps=1, norm=True) == [0, 0]
    assert two_ranks(data, first.path, KILLED, norm=True) == [70, -9]
    saved = steps_in(first.checkpoints)
    assert [path.stem for path in saved] == ["step-00000002", "step-00000003"]
    kept, whole = (checkpoint.read(run.checkpoint(3))["state"] for run in (first, calm))
    assert same_weights(kept["model"], whole["model"])
    mean = "layers.1.running_mean"  # of one rank, which has seen the images of the lost step, too
    assert torch.allclose(kept["model"][mean], whole["model"][mean], atol=0.1)
    spoiled = bytearray(saved[1].read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    first.checkpoint(4).write_bytes(spoiled)
    assert two_ranks(data, second.path, earlier_attempts=first.path, norm=True) == [0, 0]
    assert same_weights(weights(second), weights(calm))
    assert exact_epochs(first.path, second.path) == [[2], [2]]


def test_another_rank_saves_if_the_one_that_writes_to_their_disk_is_lost(make_shards, tmp_path):
    data, run = make_shards(train=(20, 20, 12), val=(8, 5)), RunFolder(tmp_path / "run")
    assert two_ranks(data, run.path, WRITER_KILLED, save_steps=0) == [-9, 70]
    assert [path.stem for path in steps_in(run.checkpoints)] == ["step-00000003"]


def test_a_rank_that_waits_for_a_stopped_one_saves_the_last_whole_step(make_shards, tmp_path):
    """Its main thread is in an exchange that does not end, and takes no signal: a thread saves
    step 3, with the weights of two ranks to which nothing happened."""
    data = make_shards(train=(20, 20, 10), val=(8, 5))
    calm, first, second = (RunFolder(tmp_path / name) for name in ("calm", "first", "second"))
    assert two_ranks(data, calm.path, save_steps=1) == [0, 0]
    assert two_ranks(data, first.path, STOPPED, save_steps=0) == [143, -9]
    assert [path.stem for path in steps_in(first.checkpoints)] == ["step-00000003"]
    kept, whole = (checkpoint.read(run.checkpoint(3))["state"] for run in (first, calm))
    assert same_weights(kept["model"], whole["model"])
    assert two_ranks(data, second.path, earlier_attempts=first.path) == [0, 0]
    assert same_weights(weights(second), weights(calm))
    assert exact_epochs(first.path, second.path) == [[2], [2]]


def same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Return whether all but the statistics of batch norms are equal."""
    names = [name for name in theirs if "running" not in name and "tracked" not in name]
    return all(torch.equal(ours[name], theirs[name]) for name in names)
