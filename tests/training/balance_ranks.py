"""Started by test_balance: ranks that take a known time for an image.

    balance_ranks.py FOLDER RUNS    RUNS: a JSON list of settings of training, and beside them
                                    name, delays (seconds an image, by rank), noise, norm,
                                    looks (exchanges after which the cut is judged)

Every rank leaves FOLDER/<name>-<rank>.json: when each step ended, the most images that it computed
at once, the digest of its state, and the seconds that it spent on --balance.
"""

import json
import os
import random
import sys
import time
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from rackrun.training import balance, setup
from rackrun.training.balance import Balance
from rackrun.training.config import Config
from rackrun.training.data.worker_server import start_worker_server
from rackrun.training.ranks import Ranks
from rackrun.training.task import Task
from rackrun.training.world import joined
from tests.training import exact_ranks

FOLDER = exact_ranks.FOLDER


class Slow(exact_ranks.Double):
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


class Timed(exact_ranks.Kept):
    """A state that notes when each of its steps is taken."""

    ends: list[float] = []

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

    task = Task("slow", model, exact_ranks.transforms)
    config = exact_ranks.settings(run.pop("samples"), name, **run)
    with (
        patch.object(balance, "JUDGED_AT", judged_at),
        patch.object(Balance, "sent", spent(seconds, Balance.sent)),
        patch.object(Balance, "next_cut", spent(seconds, Balance.next_cut)),
    ):
        state = exact_ranks.ran(config, ranks, task)
    left = {
        "ends": Timed.ends,
        "largest": Slow.largest,
        "digest": exact_ranks.digest(state).hex(),
        "seconds": seconds[0],
    }
    (FOLDER / f"{name}-{ranks.rank}.json").write_text(json.dumps(left))


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
