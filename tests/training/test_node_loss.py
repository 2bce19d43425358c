"""A host is cut off in the middle of an epoch: the run goes on, and every epoch stays exact."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch

from rackrun.run_folder import RunFolder
from rackrun.training import checkpoint
from rackrun.training.checkpoint import steps_in
from rackrun.training.run.noted_rows import VARIABLE
from tests import warm
from tests.launcher.lab import free_port
from tests.launcher.netlab import NetLab, net_labs
from tests.training.trained_rows import exact_epochs
from tests.waiting import until

EPOCHS, STEPS = 10, 10  # of 200 samples
OPTIONS = (
    "--image-size", "24", "--width", "8", "--crop-area", "0.8", "--label-smoothing", "0",
    "--ema-decay", "0", "--optimizer", "adamw", "--lr", "0.01", "--warmup-epochs", "1",
    "--epochs", str(EPOCHS), "--global-batch", "20", "--exact-epochs",
    "--save-steps", "4", "--keep-checkpoints", "99", "--workers", "0", "--device", "cpu",
    "--no-tensorboard",
)  # fmt: skip
TASK = ("catdog", "--data", "shards", "--lr-schedule", "gates:cosine", *OPTIONS)
CUTS = (36, 76)
"""Steps at which attempts wait until a cable is pulled, however fast they are."""
GATES = """
import math
import time
from pathlib import Path


def cosine(step: int, steps: int) -> float:
    for number, cut in enumerate({cuts}, start=1):
        while step + 10 >= cut and not Path("{folder}/cut-" + str(number)).exists():
            time.sleep(0.02)
    return 0.5 * (1 + math.cos(math.pi * step / steps))
"""
"""A schedule of the learning rate, after a warm-up of 10 steps."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SHORT = (
    "--lease-seconds", "3", "--max-restarts", "2", "--name", "net",
    "--env", "OMP_NUM_THREADS=1", "--env", f"{VARIABLE}=1",
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


def cut_off(
    process: "subprocess.Popen[str]", lab: NetLab, number: int, attempt: int, step: int
) -> None:
    """Pull a host's cable as soon as this attempt has saved this many steps."""

    def saved() -> bool:
        assert process.poll() is None, process.communicate()
        runs = attempts(lab, number)[attempt - 1 : attempt]
        files = [path for run in runs for path in steps_in(run.checkpoints)]
        return any(path.name >= f"step-{step:08d}" for path in files)

    until(saved, f"attempt {attempt} saves step {step}", SECONDS)
    lab.pull_cable(number)
    (lab.folder / f"cut-{attempt}").touch()


def losses(run: RunFolder) -> list[float]:
    """Return the loss on the validation set after each epoch."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "evaluate"]


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
    task = ("catdog", "--data", str(shapes), *TASK[3:])
    args = (warm.interpreter(), "-m", *task, "--run-folder", run)
    job = [
        subprocess.Popen(args, env={**os.environ, **ONE_THREAD, **world, "RANK": str(rank)})
        for rank in range(ranks)
    ]
    assert [rank.wait(SECONDS) for rank in job] == [0] * ranks
    return RunFolder(run)


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = checkpoint.read(run.final)["model"]
    return result


def test_a_spare_takes_over(net: Callable[[int], NetLab], shapes: Path, tmp_path: Path) -> None:
    """One of two hosts is cut off in mid-epoch; a third, new to the run, takes its place: every
    epoch is the data set, and the weights are, bit for bit, those of two ranks to which nothing
    happened."""
    lab = net(3)
    (lab.folder / "cut-2").touch()
    process = lab.run_ssh(*SHORT, "--spares", "1", hosts(lab, lab.cheap_python(trains=True)), *TASK)
    cut_off(process, lab, 2, attempt=1, step=32)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert out.count("resumed after step") == 1
    went_on = attempts(lab, 1)[-1]
    assert exact(lab, went_on) == [2]
    calm = weights(trained_in_peace(shapes, tmp_path / "calm", ranks=2))
    assert all(torch.equal(calm[name], tensor) for name, tensor in weights(went_on).items())


@pytest.mark.long
def test_a_spare_takes_over_and_then_fewer_go_on(
    net: Callable[[int], NetLab], shapes: Path, tmp_path: Path
) -> None:
    """Real torchrun on three of four hosts: one is lost, the spare comes; the first host, with
    rank 0 and the master, is lost, and two go on. Every epoch is the data set, and the loss ends
    where it would have ended, but for what batch norms make of three or two parts of a batch."""
    lab = net(4)
    rules = ("--spares", "1", "--min-hosts", "2")
    process = lab.run_ssh(*SHORT, *rules, hosts(lab, Path(sys.executable)), *TASK)
    cut_off(process, lab, 2, attempt=1, step=32)
    cut_off(process, lab, 1, attempt=2, step=72)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert out.count("resumed after step") == 2
    went_on = attempts(lab, 3)[-1]
    assert exact(lab, went_on) == [3, 2]
    calm = losses(trained_in_peace(shapes, tmp_path / "calm", ranks=3))
    assert calm[-1] < 0.4 and losses(went_on)[-1] < 0.4  # it was 0.7 at the start
