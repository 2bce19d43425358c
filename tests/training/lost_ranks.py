"""A rank of a run that loses one, for test_node_loss: lost_ranks.py OPTIONS DIE, both JSON.

OPTIONS are settings of training; DIE says which rank gets which signal in which step, before its
gradients reach the others: {"rank": 1, "step": 4, "signal": 9}.
"""

import json
import os
from itertools import count
from typing import Any

import torch
from torch import nn

from rackrun.training import train as loop
from rackrun.training.config import Config
from rackrun.training.data.transforms import Transforms
from rackrun.training.entry import enter
from rackrun.training.task import Task

SIZE = 8
torch.set_num_threads(1)


class Small(nn.Module):
    """A small model in float64, so that only true differences show."""

    def __init__(self, norm: bool) -> None:
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


def transforms(config: Config, epoch: int) -> Transforms:
    """Return those of small images."""
    return Transforms(SIZE)


def main(args: list[str]) -> int:
    """Train with the options, and die where the test says so."""
    options, die = (json.loads(arg) for arg in args)
    norm = options.pop("norm", False)
    if die.get("rank") == int(os.environ.get("RANK", 0)):
        die_in(die["step"], die["signal"])

    def model(config: Config, classes: int) -> nn.Module:
        torch.manual_seed(5)
        return Small(norm)

    return loop.run(Task("small", model, transforms), Config(**options))


def die_in(number: int, signum: int) -> None:
    """Send this process a signal when it has computed the loss of this step."""
    steps, summed_loss = count(1), loop.summed_loss

    def lost(*args: Any) -> torch.Tensor:
        loss = summed_loss(*args)
        if next(steps) == number:
            os.kill(os.getpid(), signum)
        return loss

    loop.summed_loss = lost


if __name__ == "__main__":
    enter(main)
