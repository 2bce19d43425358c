"""A host is lost and comes back: the run goes on without it, and then with it again."""

import json
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch

import rackrun
from tests.lab.data import drawn_shards
from tests.lab.network import NetLab, net_labs
from tests.lab.oracles import exact_epochs
from tests.lab.ranks import codes, exact_ranks
from tests.lab.waiting import until

SECONDS = 240
LIMITS = ("--lease-seconds", "3", "--max-restarts", "1", "--min-hosts", "1")
NOTED = ("--env", "RACKRUN_NOTE_ROWS=1", "--env", "OMP_NUM_THREADS=1")
TASK = {"epochs": 10, "global_batch": 8, "batch_size": 8}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[NetLab]:
    """Yield two hosts behind cables, each with a disk of its own: shards and a task are on both."""
    with net_labs(tmp_path / "lab") as make:
        lab = make(2)
        shards = drawn_shards(tmp_path)
        for folder in (lab.folder, *disks(lab)):
            folder.mkdir(exist_ok=True)
            shutil.copy(Path(__file__).parents[2] / "lab" / "exact_task.py", folder)
            (folder / "shards").symlink_to(shards)
        yield lab


def disks(lab: NetLab) -> list[Path]:
    """Return the working folder of each host, which no other host sees."""
    return [lab.folder / f"disk-{number}" for number in range(1, len(lab.hosts) + 1)]


def steps_on(disk: Path) -> int:
    """Return how many steps the rank of a host has begun."""
    return sum(len(path.read_text().splitlines()) for path in disk.glob("runs/2*/rows/*.jsonl"))


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the newest checkpoint."""
    return rackrun.load_checkpoint(max(run.glob("checkpoints/step-*.pt"))).weights


@pytest.mark.root
def test_a_host_that_comes_back_takes_part_from_the_end_of_an_epoch(lab, tmp_path):
    """One of two hosts is cut off, and back a moment later. The other goes on alone until an epoch
    ends, and then both do: that costs no restart, each epoch has every sample once, and the weights
    are those of two ranks to which nothing happened."""
    python = lab.cheap_python(trains=True)
    hosts = lab.write_hosts(*(f"python={python} workdir={disk}" for disk in disks(lab)))
    options = [word for name, value in TASK.items() for word in (option(name), str(value))]
    task = ("./exact_task.py", "--data", "shards", "--seconds", "0.06,0.06", *options)
    process = lab.run_ssh(*LIMITS, *NOTED, str(hosts), *task)
    until(lambda: steps_on(disks(lab)[1]) > 2, "both train", SECONDS)
    lab.pull_cable(2)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "restart 1 of 1" in line:
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


def option(name: str) -> str:
    """Return the option of a setting."""
    return f"--{name.replace('_', '-')}"
