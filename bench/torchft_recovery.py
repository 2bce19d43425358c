"""Measure what losses cost TorchFT, for the table of bench.elastic.

    python -m venv --without-pip /tmp/torchft
    python -m pip install --no-deps --target /tmp/torchft/lib/python3.*/site-packages \\
        torchft-nightly
    PYTHONPATH=.:.venv/lib/python3.11/site-packages \\
        /tmp/torchft/bin/python -m bench.torchft_recovery [--kills 10] | grep TorchFT

Four replicas of one rank each, with gloo, train the network of bench.elastic on random images of
its size, as many a step; TorchFT keeps no order of samples. One replica after the other is killed,
and started again once the others have gone on. Prints the seconds from a kill to the next step that
the others commit, and from the start of a replica to its first committed step.

TorchFT is no dependency of rackrun: this runs where it is installed beside torch.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from tests.waiting import until

REPLICAS = 4
IMAGES = 6  # of each replica in a step


@dataclass(frozen=True)
class Settings:
    """Losses of replicas under TorchFT."""

    kills: int = 10
    """How many replicas are killed."""
    heartbeat_seconds: float = 5.0
    """After which the lighthouse takes a silent replica for lost; 5 is its default."""
    seed: int = 1
    """Which replicas, and when."""


def main(args: list[str]) -> None:
    """Kill replicas one after the other, and print how the others went on."""
    settings = parse(Settings, "python -m bench.torchft_recovery", args)
    lighthouse = import_module("torchft.coordination").LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=2,
        heartbeat_timeout_ms=round(1000 * settings.heartbeat_seconds),
    )
    dice = random.Random(settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"steps-{number}") for number in range(REPLICAS)]
        replicas = [started(number, lighthouse.address(), logs[number]) for number in range(4)]
        try:
            lost, joined = [], []
            for _ in range(settings.kills):
                before = [len(steps(log)) for log in logs]
                until(lambda before=before: all_have_stepped(logs, before), "all train", 300)
                time.sleep(dice.uniform(0, 1))
                number = dice.randrange(REPLICAS)
                at = time.time()
                replicas[number].kill()
                replicas[number].wait()
                others = [log for log in logs if log != logs[number]]
                lost.append(until(lambda at=at, others=others: next_step(others, at), "", 300))
                begun = time.time()
                replicas[number] = started(number, lighthouse.address(), logs[number])
                log = [logs[number]]
                joined.append(until(lambda at=begun, log=log: next_step(log, at), "", 300))
        finally:
            for replica in replicas:
                replica.kill()
        print(
            f"TorchFT: {len(lost)} losses, next step {quantiles(lost)}; joined {quantiles(joined)}"
        )


def started(number: int, lighthouse: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a replica, which writes the time of each committed step."""
    args = ["-c", "from bench.torchft_recovery import train; train()", str(number), str(log)]
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *args], env=env, stderr=subprocess.DEVNULL)


def train() -> None:
    """Train as one replica, without end."""
    import torch
    from torch import nn

    torchft: Any = import_module("torchft")
    torch.manual_seed(3)
    model: Any = nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4),
        *(nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2)),
    )
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            inner.load_state_dict(state["optimizer"]),
        ),
        min_replica_size=2,
        replica_id=f"replica_{sys.argv[1]}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
    )
    parallel, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer
    optimizer = optimizer(manager, inner)
    while True:
        images, labels = torch.rand(IMAGES, 3, 48, 48), torch.randint(2, (IMAGES,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(images), labels).backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            with Path(sys.argv[2]).open("a") as file:
                file.write(f"{time.time()}\n")


def steps(log: Path) -> list[float]:
    """Return when a replica committed its steps."""
    return [float(line) for line in log.read_text().splitlines()] if log.exists() else []


def all_have_stepped(logs: list[Path], before: list[int]) -> bool:
    """Return whether each replica has committed a few steps since."""
    return all(len(steps(log)) > count + 5 for log, count in zip(logs, before, strict=True))


def next_step(logs: list[Path], at: float) -> float:
    """Return the seconds from a time to the first step after it; 0 if there is none yet."""
    # A step that was under way at the kill may still be committed: it needs nobody any more.
    return min((time - at for log in logs for time in steps(log) if time > at + 0.02), default=0.0)


def quantiles(seconds: list[float]) -> str:
    """Return median, 95th percentile and the longest."""
    ordered = sorted(seconds)
    high = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return f"p50 {ordered[len(ordered) // 2]:.2f} s, p95 {high:.2f} s, max {ordered[-1]:.2f} s"


if __name__ == "__main__":
    run(main)
