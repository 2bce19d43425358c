"""A host is lost: the run goes on without it, and with it once it is back, or with another one."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
import torch

import rackrun
from tests.lab.data import drawn_shards
from tests.lab.network import NetLab
from tests.lab.oracles import exact_epochs
from tests.lab.ranks import codes, exact_ranks
from tests.lab.waiting import until

SECONDS = 240
RESTART = ("--max-restarts", "1")
LIMITS = ("--lease-seconds", "3", *RESTART, "--min-hosts", "1")
NOTED = ("--env", "RACKRUN_NOTE_ROWS=1", "--env", "OMP_NUM_THREADS=1")
TASK = {"epochs": 10, "global_batch": 8, "batch_size": 8}


@pytest.fixture
def hosts_with_disks(net: Callable[[int], NetLab], tmp_path: Path) -> Callable[[int], NetLab]:
    """Return what makes hosts behind cables, each with a disk of its own: shards and a task are on
    all of them."""

    def make_with_disks(count: int) -> NetLab:
        lab, shards = net(count), drawn_shards(tmp_path)
        for folder in (lab.folder, *disks(lab)):
            folder.mkdir(exist_ok=True)
            shutil.copy(Path(__file__).parents[2] / "lab" / "exact_task.py", folder)
            (folder / "shards").symlink_to(shards)
        return lab

    return make_with_disks


def disks(lab: NetLab) -> list[Path]:
    """Return the working folder of each host, which no other host sees."""
    return [lab.folder / f"disk-{number}" for number in range(1, len(lab.hosts) + 1)]


def steps_on(disk: Path) -> int:
    """Return how many steps the rank of a host has begun."""
    return sum(len(path.read_text().splitlines()) for path in disk.glob("runs/2*/rows/*.jsonl"))


def until_another_step_on(disk: Path) -> None:
    """Wait until the rank of a host has begun one more step than now."""
    now = steps_on(disk)
    until(lambda: steps_on(disk) > now, f"another step on {disk.name}", SECONDS)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the newest checkpoint."""
    return rackrun.load_checkpoint(max(run.glob("checkpoints/step-*.pt"))).weights


def test_a_host_that_comes_back_takes_part_from_the_end_of_an_epoch(hosts_with_disks, tmp_path):
    """One of two hosts is cut off, and back a moment later. The other goes on alone until an epoch
    ends, and then both do: that costs no restart, each epoch has every sample once, and the weights
    are those of two ranks to which nothing happened."""
    lab = hosts_with_disks(2)
    process = lab.run_ssh(*LIMITS, *NOTED, str(written(lab)), *task(0.06))
    until(lambda: steps_on(disks(lab)[1]) > 2, "both train", SECONDS)
    lab.pull_cable(2)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "restart 1 of 1" in line:  # back before the first step, it would be part of this attempt
            until_another_step_on(disks(lab)[0])
            lab.plug_cable(2)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0, "".join(said)
    assert sum("node2 can take part again" in line for line in said) == 1
    (run,) = lab.folder.glob("runs/2*")
    runs = [disk / "runs" / run.name for disk in disks(lab)]
    worlds = [world for worlds in exact_epochs(runs[1], runs[0]) for world in worlds]
    assert [world for world, _ in groupby(worlds)] == [2, 1, 2]
    attempts = json.loads((run / "result.json").read_text())["attempts"]
    assert [attempt["exit_code"] for attempt in attempts] == [75, 75, 0]
    calm = tmp_path / "calm"
    assert codes(exact_ranks(lab.folder / "shards", [calm, calm], **TASK)) == [0, 0]
    ours, theirs = weights(runs[0]), weights(calm)
    assert all((ours[name] - theirs[name]).abs().max() < 1e-6 for name in theirs)
    assert set(json.loads((run / "result.json").read_text())["hosts"].values()) == {"clean"}


def test_a_host_that_is_added_to_the_file_replaces_a_lost_one(hosts_with_disks):
    """While two hosts train, the second is taken out of hosts.txt and a third one added; the cable
    of the second is pulled. The restart reads the file again: the first and the third go on, with
    every epoch exact, and `stop` would end the run on the third one, too."""
    lab = hosts_with_disks(3)
    hosts = written(lab)
    first, second, third = hosts.read_text().splitlines(keepends=True)
    hosts.write_text(first + second)
    process = lab.run_ssh("--lease-seconds", "3", *RESTART, *NOTED, str(hosts), *task(0.03))
    until(lambda: steps_on(disks(lab)[1]) > 2, "both train", SECONDS)
    hosts.write_text(first + third)
    lab.pull_cable(2)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    (run,) = lab.folder.glob("runs/2*")
    runs = [disk / "runs" / run.name for disk in disks(lab)]
    worlds = [world for worlds in exact_epochs(*reversed(runs)) for world in worlds]
    assert [world for world, _ in groupby(worlds)] == [2]
    ends = json.loads((run / "result.json").read_text())["hosts"]
    assert {name.partition(":")[0]: end == "clean" for name, end in ends.items()} == {
        "node1": True,
        "node2": False,
        "node3": True,
    }
    assert "node3" in (run / "hosts.json").read_text()


LOSSES = 30
NOTICED_SECONDS = 1.0  # a lease is longer: by its end the others wait in a collective


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_after_thirty_random_losses_three_epochs_are_exact(tmp_path):
    """Up to three ranks, each with a disk of its own. At random moments one is killed, or stopped,
    and the launcher's signal reaches the others: these go on, or all do. No step is missing, and
    each loss costs one at most; the weights are those of a run to which nothing happened."""
    chance, data = random.Random(11), drawn_shards(tmp_path, 400)
    disks = [tmp_path / f"disk-{number}" / "run" for number in range(3)]
    for disk in disks:
        disk.parent.mkdir()
    options = {**TASK, "epochs": 3, "seconds": "0.02,0.02,0.02", "earlier_attempts": "run"}
    present = disks
    for number in range(LOSSES):
        before = [noted_on(disk) for disk in present]
        ranks = exact_ranks(data, present, **options)
        until(
            lambda: all(map(int.__gt__, map(noted_on, present), before)),  # noqa: B023
            f"attempt {number} trains",
            SECONDS,
        )
        time.sleep(chance.uniform(0.0, 0.3))
        lost = chance.choice(ranks)
        os.kill(lost.pid, chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)))
        time.sleep(NOTICED_SECONDS)
        left = [rank for rank in ranks if rank is not lost]
        for rank in left:
            rank.terminate()
        assert all(codes(left))
        lost.kill()
        codes([lost])
        survivors = [disk for disk, rank in zip(present, ranks, strict=True) if rank is not lost]
        present = chance.choice((chance.sample(disks, 3), survivors if len(left) > 1 else disks))
    assert set(codes(exact_ranks(data, present, **options))) == {0}
    exact_epochs(*(disk for disk in disks if disk != present[0]), present[0])
    steps = [json.loads(line)["step"] for disk in disks for line in lines(disk, "rank-0")]
    assert len(steps) <= len(set(steps)) + LOSSES
    calm = tmp_path / "calm"
    assert codes(exact_ranks(data, [calm, calm], **{**TASK, "epochs": 3})) == [0, 0]
    ours, theirs = weights(present[0]), weights(calm)
    assert all((ours[name] - theirs[name]).abs().max() < 1e-6 for name in theirs)


def lines(run: Path, rank: str = "rank-*") -> list[str]:
    """Return the lines about steps that ranks have begun, in a run folder."""
    return [
        line for path in run.glob(f"rows/{rank}.jsonl") for line in path.read_text().splitlines()
    ]


def noted_on(run: Path) -> int:
    """Return how many steps ranks have begun there."""
    return sum(line.endswith("}") for line in lines(run))


def written(lab: NetLab) -> Path:
    """Write hosts.txt for all hosts of the lab."""
    python = lab.cheap_python(trains=True)
    return lab.write_hosts(*(f"python={python} workdir={disk}" for disk in disks(lab)))


def task(seconds: float) -> list[str]:
    """Return the words of the task, on two ranks that compute for so long for an image."""
    options = [word for name, value in TASK.items() for word in (option(name), str(value))]
    speeds = f"{seconds},{seconds}"
    return ["./exact_task.py", "--data", "shards", "--seconds", speeds, *options]


def option(name: str) -> str:
    """Return the option of a setting."""
    return f"--{name.replace('_', '-')}"
