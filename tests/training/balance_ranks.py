"""Started by test_balance: ranks that take a known time for an image.

    balance_ranks.py FOLDER RUNS    RUNS: a JSON list of settings of training, and beside them
                                    name, delays (seconds an image, by rank), noise, norm,
                                    looks (exchanges after which the cut is judged)

Every rank leaves FOLDER/<name>-<rank>.json: when each step ended, the most images that it computed
at once, the digest of its state, and the seconds that it spent on --balance.
"""

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from rackrun.training import balance, setup
from rackrun.training.balance import Balance
from rackrun.training.config import Config
from rackrun.training.data.open import open_data
from rackrun.training.data.transforms import Transforms
from rackrun.training.data.worker_server import start_worker_server
from rackrun.training.device import set_up
from rackrun.training.ranks import Ranks
from rackrun.training.run.resume import resumed
from rackrun.training.setup import TrainingRun
from rackrun.training.state import TrainingState
from rackrun.training.stop_requests import StopRequests
from rackrun.training.task import Task
from rackrun.training.train import train
from rackrun.training.world import joined
from tests.lab.oracles import NOTED

SIZE = 8
FOLDER = Path(sys.argv[1])
os.environ |= NOTED


class Double(nn.Module):
    """A small model that computes in float64, so that only true differences show."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4) if norm else nn.Identity(),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 6 * 6, 8),
            nn.Tanh(),
            nn.Linear(8, 2),
        ).double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(images.double())
        return outputs


class Slow(Double):
    """A model that takes a time for each image, in float64 so that only true differences show."""

    largest = 0

    def __init__(self, norm: bool, delay: float, noise: float) -> None:
        super().__init__(norm)
        self.delay, self.noise = delay, noise
        self.chance = random.Random(os.environ["RANK"])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            Slow.largest = max(Slow.largest, len(images))
            factor = 1 + self.chance.gauss(0, self.noise)
            time.sleep(max(0.0, len(images) * self.delay * factor))
        return super().forward(images)


class Timed(TrainingState):
    """A state that notes when each of its steps is taken, and can be looked at after the run."""

    ends: list[float] = []
    last: TrainingState

    def __init__(self, model: nn.Module, config: Config, float16: bool = False) -> None:
        super().__init__(model, config, float16)
        Timed.last = self

    def advance(self) -> None:
        super().advance()
        Timed.ends.append(time.time())


def spent(seconds: list[float], method: Any) -> Any:
    """Return a method that adds up the time that it takes."""

    def timed(*args: Any) -> Any:
        begun = time.perf_counter()
        result = method(*args)
        seconds[0] += time.perf_counter() - begun
        return result

    return timed


def main(runs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    if any(run.get("workers") for run in runs):
        start_worker_server(__name__)
    with patch.object(setup, "TrainingState", Timed), joined(Config(device="cpu")) as ranks:
        for run in runs:
            ran(ranks, run)
    os._exit(0)


def ran(ranks: Ranks, run: dict[str, Any]) -> None:
    name, delays, noise, norm = (run.pop(key) for key in ("name", "delays", "noise", "norm"))
    judged_at = run.pop("looks", balance.JUDGED_AT)
    seconds = [0.0]
    Slow.largest, Timed.ends = 0, []

    def model(config: Config, classes: int) -> nn.Module:
        torch.manual_seed(5)
        return Slow(norm, delays[ranks.rank], noise)

    task = Task("slow", model, transforms)
    config = settings(run.pop("samples"), name, **run)
    with (
        patch.object(balance, "JUDGED_AT", judged_at),
        patch.object(Balance, "sent", spent(seconds, Balance.sent)),
        patch.object(Balance, "next_cut", spent(seconds, Balance.next_cut)),
    ):
        state = trained(config, ranks, task)
    left = {
        "ends": Timed.ends,
        "largest": Slow.largest,
        "digest": digest(state).hex(),
        "seconds": seconds[0],
    }
    (FOLDER / f"{name}-{ranks.rank}.json").write_text(json.dumps(left))


def transforms(config: Config, epoch: int) -> Transforms:
    return Transforms(SIZE, crop_area=0.5)


def settings(samples: int, name: str, **options: Any) -> Config:
    values: dict[str, Any] = {
        "data": str(FOLDER / str(samples)), "run_folder": str(FOLDER / "runs" / name),
        "epochs": 2, "batch_size": 16, "global_batch": 16, "lr": 0.05, "momentum": 0.9,
        "clip_grad": 0.5, "ema_decay": 0.5, "weight_decay": 0.01, "workers": 0,
        "tensorboard": False, "device": "cpu", "exact_epochs": True,
        "precision": "fp32",
    }  # fmt: skip
    return Config(**{**values, **options})


def trained(config: Config, ranks: Ranks, task: Task) -> dict[str, Any]:
    """Run; return the state at the end."""
    with StopRequests(config.save_minutes) as stops:
        compute = set_up(config, ranks)
        earlier = resumed(config.resume, task.name, ranks) if config.resume else None
        if earlier:
            config = earlier.resolved(config)
        data = open_data(
            config, ranks, partial(task.transforms, config), task.name, task.synthetic_classes
        )
        assert train(TrainingRun(task, config, ranks, stops, compute, data, earlier)) == 0
    return Timed.last.state_dict()


def tensors(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a state with its path."""
    if isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from tensors(value, f"{name}.{key}")
    else:
        yield name, state


def digest(state: dict[str, Any]) -> bytes:
    total = hashlib.sha256()
    for name, value in tensors(state):
        content = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value)
        total.update(f"{name}={content!r}".encode())
    return total.digest()


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
