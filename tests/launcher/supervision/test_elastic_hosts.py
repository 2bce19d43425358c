"""Elastic runs over SSH: cables, returning hosts, detached runs; ranks without torch.

The interpreter of the hosts starts `elastic_rank.py` in place of a task's rank.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.remote import run_manager
from tests.launcher.lab import ROOT, Lab, with_signal
from tests.launcher.netlab import NetLab
from tests.waiting import until

RANK = ROOT / "tests" / "launcher" / "elastic_rank.py"
OPTIONS = ("--elastic", "--plain", "--no-serve", "--lease-seconds=3")
TASK = ("classify", "--synthetic", "--exact-epochs", "--epochs=1", "--device=cpu")


def hosts_of(lab: Lab, steps: int) -> str:
    """Write hosts.txt; each host has a folder of its own, and ranks that make so many steps."""
    python = lab.cheap_python(torch="2.15.0", name="elastic-python")
    *begin, last = python.read_text().splitlines(keepends=True)
    rank = f'case "$2 $3" in "-m training") exec {sys.executable} {RANK} {steps} 0.05;; esac\n'
    python.write_text("".join((*begin, rank, last)))
    settings = []
    for host in lab.hosts:
        (host.folder / "work").mkdir()
        settings.append(f"python={python} workdir={host.folder}/work")
    return str(lab.write_hosts(*settings))


def lines(lab: Lab, member: int) -> list[dict[str, Any]]:
    """Return the steps that the only rank of a host has made, in all its processes."""
    paths = lab.hosts[member].folder.glob(f"work/runs/2*/steps-{member}")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def step(lab: Lab, member: int) -> int:
    """Return the newest step of a member; 0 before the first."""
    made = lines(lab, member)
    return int(made[-1]["step"]) if made else 0


def processes(lab: Lab, member: int) -> set[int]:
    """Return the processes in which a member has made steps."""
    return {int(line["pid"]) for line in lines(lab, member)}


def kept_on(lab: Lab, steps: int, *members: int) -> None:
    """Every step once, in order, in one process."""
    for member in members:
        assert [line["step"] for line in lines(lab, member)] == list(range(1, steps + 1))
        assert len(processes(lab, member)) == 1


def test_a_cable_that_is_pulled_and_plugged_in_again(net: Callable[[int], NetLab]) -> None:
    """Without its cable the first host is left out, and ends its ranks; with it, it joins again."""
    lab = net(3)
    process = lab.run_ssh(*OPTIONS, hosts_of(lab, 900), *TASK)
    until(lambda: min(step(lab, member) for member in range(3)) > 10, "all ranks train")
    lab.pull_cable(1)
    at = step(lab, 1)
    until(lambda: step(lab, 1) > at + 100, "the others go on")
    (old,) = processes(lab, 0)
    until(lambda: not Path(f"/proc/{old}").exists(), "the lost host ends its rank by itself")
    lab.plug_cable(1)
    until(lambda: len(processes(lab, 0)) == 2, "the host has joined again")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    kept_on(lab, 900, 1, 2)
    assert "rank 0 on node1 joined; 3 ranks on 3 hosts go on" in err
    last = {lines(lab, member)[-1]["digest"] for member in range(3)}
    assert len(last) == 1


def test_a_detached_run_goes_on_without_a_lost_rank(start_lab: Callable[[int], Lab]) -> None:
    """The controller on the first host regroups as a launcher does; attach shows what it did."""
    lab = start_lab(3)
    code, run, err = lab.result_of("--detach", *OPTIONS, hosts_of(lab, 400), *TASK)
    assert code == 0, err
    until(lambda: min(step(lab, member) for member in range(3)) > 10, "all ranks train")
    (lost,) = processes(lab, 2)
    os.kill(lost, signal.SIGKILL)
    until(lambda: len(processes(lab, 2)) == 2, "the rank has joined again")
    code, _, err = lab.result_of("--plain", run.strip(), verb=("attach",))
    assert code == 0, err
    kept_on(lab, 400, 0, 1)
    assert "lost rank 2 on" in err and "rank 2 on 127.0.0.4 joined; 3 ranks" in err
    assert "1 loss, 1 join; 3 ranks at the end" in err


def test_a_run_below_its_least_number_of_hosts_restarts(start_lab: Callable[[int], Lab]) -> None:
    """With --max-restarts it starts again where it may not go on, as any other run would."""
    lab = start_lab(2)
    options = ("--min-hosts=2", "--max-restarts=1", *OPTIONS)
    process = lab.run_ssh(*options, hosts_of(lab, 100), *TASK)
    until(lambda: min(step(lab, member) for member in range(2)) > 10, "all ranks train")
    (lost,) = processes(lab, 1)
    os.kill(lost, signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "restart 1 of 1" in err and "killed by SIGKILL" in err
    assert len(processes(lab, 0)) == 2, "the other rank was started again as well"


def test_hosts_that_are_added_to_the_file_join(start_lab: Callable[[int], Lab]) -> None:
    """A new line is a host that joins; one that cannot be taken is named, and ends nothing."""
    lab = start_lab(4)
    path = Path(hosts_of(lab, 500))
    first, second, third, fourth = path.read_text().splitlines()
    path.write_text(f"{first}\n{second}\n")
    log = lab.folder / "launcher.log"
    with log.open("w") as errors:
        process = lab.run_ssh(*OPTIONS, str(path), *TASK, stderr=errors)
    until(lambda: min(step(lab, member) for member in range(2)) > 10, "all ranks train")
    path.write_text(f"{first}\n{second}\n{second}\nnode9 slots=none\n")
    until(lambda: "slots=none" in log.read_text(), "the faults of the file are shown")
    unfit = fourth.partition("workdir=")[0]
    path.write_text(f"{first}\n{third}\n{unfit}workdir=/nowhere\n")
    process.communicate(timeout=300)
    err = log.read_text()
    assert process.returncode == 0, err
    kept_on(lab, 500, 0, 1)
    assert f"not added: {path}:3:1: 127.0.0.3 is on line 2 already" in err
    assert "not added: 127.0.0.5: workdir: " in err
    assert "127.0.0.4, new in the host file, starts, and will join" in err
    assert "rank 2 on 127.0.0.4 joined; 3 ranks on 3 hosts go on from step" in err
    last = {lines(lab, member)[-1]["digest"] for member in range(3)}
    assert len(last) == 1 and not lines(lab, 3)
    (folder,) = lab.folder.glob("runs/2*")
    plan, result = (
        json.loads((folder / name).read_text()) for name in ("plan.json", "result.json")
    )
    assert [host["name"] for host in plan["hosts"]] == [*result["hosts"]]
    assert set(result["hosts"].values()) == {"clean"} and len(result["hosts"]) == 3
    assert (folder / "logs" / "127.0.0.4" / "rank-2.out").read_text() == "done at step 500\n"


def test_a_restart_has_the_hosts_that_were_added(start_lab: Callable[[int], Lab]) -> None:
    """Where an elastic run may not go on, its next attempt starts on all hosts that it had."""
    lab = start_lab(3)
    path = Path(hosts_of(lab, 300))
    first, second, third = path.read_text().splitlines()
    path.write_text(f"{first}\n{second}\n")
    options = ("--min-hosts=2", "--max-restarts=1", *OPTIONS)
    process = lab.run_ssh(*options, str(path), *TASK)
    until(lambda: min(step(lab, member) for member in range(2)) > 10, "all ranks train")
    path.write_text(f"{third}\n{first}\n{second}\n")
    until(lambda: step(lab, 2), "the third host has joined")
    for member in (1, 2):
        (lost,) = processes(lab, member)
        os.kill(lost, signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "restart 1 of 1" in err
    plans = [json.loads(plan.read_text()) for plan in sorted(lab.folder.glob("runs/2*/plan.json"))]
    names = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    assert [[host["name"] for host in plan["hosts"]] for plan in plans] == [names, names]
    assert [plan["world_size"] for plan in plans] == [2, 3]


SLOW = """
import time

from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.last = nn.Linear(48, num_classes)

    def forward(self, images):
        time.sleep(0.05)
        return self.last(self.pool(images).flatten(1))
"""


def ranks(lab: Lab) -> list[int]:
    """Return the processes that train on the hosts."""
    found = []
    for pid in run_manager.our_pids():
        with contextlib.suppress(OSError):
            is_rank = b"\0training\0classify\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
            if is_rank and bytes(lab.folder) in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


@pytest.mark.long
@pytest.mark.parametrize("options", [("--elastic",), ()], ids=["elastic", "plain"])
def test_a_run_whose_controller_is_killed_goes_on_from_its_last_step(
    start_lab: Callable[[int], Lab], options: tuple[str, ...]
) -> None:
    """Real ranks of a detached run keep what they have, long before a save; a resume finds it."""
    lab = start_lab(2)
    (lab.folder / "slow.py").write_text(SLOW)
    for host in lab.hosts:
        (host.folder / "work").mkdir()
        (host.folder / "work" / "slow.py").write_text(SLOW)
    settings = [f"python={sys.executable} workdir={host.folder}/work" for host in lab.hosts]
    launch = ("--plain", "--no-serve", "--env", f"PYTHONPATH={ROOT}", *options)
    launch += (str(lab.write_hosts(*settings)), "classify", "--model=slow:Net", "--synthetic")
    launch += ("--image-size=32", "--device=cpu", "--steps-per-epoch=300", "--epochs=1")
    launch += ("--log-every-steps=1", "--no-tensorboard")
    code, run, err = lab.result_of("--detach", *launch)
    assert code == 0, err
    runs = lab.hosts[0].folder / "work" / "runs"

    def step_count() -> int:
        return sum(path.read_text().count('"train"') for path in runs.glob("2*/metrics.jsonl"))

    until(lambda: step_count() > 20, "the ranks train", 120)
    with_signal(run_manager.controller_of(run.strip()), signal.SIGKILL)
    kept = "work/runs/2*/checkpoints/step-*.pt"
    until(lambda: not ranks(lab), "no rank is left", 60)
    furthest = max(path.name for host in lab.hosts for path in host.folder.glob(kept))
    number = int(furthest.removeprefix("step-").removesuffix(".pt"))
    assert number > 20
    code, out, err = lab.result_of(*launch, "--resume", "latest")
    assert code == 0, err
    assert f"resumed after step {number} of" in out
