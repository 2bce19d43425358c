"""A rank of an elastic run for test_elastic: elastic_ranks.py OPTIONS DIE, both JSON.

OPTIONS are settings of training; DIE says where this rank ends itself: {"at": PHASE, "step": N}.
"""

import faulthandler
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rackrun.training import checkpoint, loop
from rackrun.training.config import Config
from rackrun.training.data.transforms import Transforms
from rackrun.training.data.worker_server import start_worker_server
from rackrun.training.entry import enter
from rackrun.training.phases import balance, evaluate, regroup, step
from rackrun.training.run.checkpoints import RunCheckpoints
from rackrun.training.state import TrainingState
from rackrun.training.task import Task

SIZE = 8
faulthandler.register(signal.SIGUSR1)  # says where a rank is that a test waits for
torch.set_num_threads(1)


class Small(nn.Module):
    """A small model in float64, so that only true differences show."""

    def __init__(self, norm: bool, delay: float = 0.0) -> None:
        super().__init__()
        self.delay = delay  # seconds an image
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
        time.sleep(len(images) * self.delay * self.training)
        outputs: torch.Tensor = self.layers(images.double())
        return outputs


def transforms(config: Config, epoch: int) -> Transforms:
    """Return those of small images."""
    return Transforms(SIZE)


def main(args: list[str]) -> int:
    """Train with the options, and end where the test says so."""
    options, die = (json.loads(arg) for arg in args)
    if die.pop("rank", os.environ.get("RANK")) != os.environ.get("RANK"):
        die = {}
    norm, pause = options.pop("norm", False), options.pop("pause", 0.0)
    balance.JUDGED_AT = options.pop("looks", balance.JUDGED_AT)
    delays, member = options.pop("delays", []), int(os.environ.get("RACKRUN_FIRST_RANK", 0))
    released = options.pop("saves_wait_for", "")
    config = Config(elastic="RACKRUN_MEMBERSHIP" in os.environ, **options)

    def model(config: Config, classes: int) -> nn.Module:
        torch.manual_seed(5)
        return Small(norm, *delays[member : member + 1])

    task = Task("small", model, transforms)
    if config.workers:
        start_worker_server(__name__)
    patch(die, pause)
    wrap(checkpoint, "write", lambda: wait_for(released))
    return loop.run(task, config)


def patch(die: dict[str, Any], pause: float) -> None:
    """End this process at a place in a step; make every step last longer."""
    number = getattr(signal, die.get("signal", "SIGKILL"))
    begin_step, advance = TrainingState.begin_step, TrainingState.advance

    def end_at(point: str, step_number: int | None = None) -> None:
        if die.get("at") == point and step_number in (None, die.get("step")):
            time.sleep(die.get("after", 0.0))
            die.clear()
            os.kill(os.getpid(), number)
            time.sleep(0.3)  # once it goes on, it reads orders that came meanwhile first

    def slow(state: TrainingState) -> None:
        time.sleep(pause)
        end_at("begin", state.step)
        begin_step(state)

    def advanced(state: TrainingState) -> None:
        end_at("advance", state.step)
        advance(state)
        with Path(os.environ["STEPS"]).open("a") as file:
            file.write(f"{time.time()} {COUNT['generation']} {state.step}\n")
        end_at("advanced", state.step)

    TrainingState.begin_step = slow
    TrainingState.advance = advanced
    wrap(step, "summed_loss", lambda: end_at("loss", COUNT["steps"]))
    wrap(evaluate, "evaluation_sums", lambda: end_at("evaluate"))
    wrap(torch.distributed, "init_process_group", lambda: end_at("connect"))
    wrap(regroup, "_agree", lambda: end_at("agree", COUNT["agree"]))
    wrap(regroup, "pack", lambda: end_at("hand over"))
    wrap(loop, "finish", lambda: end_at("finish"))
    wrap(RunCheckpoints, "save", lambda: end_at("save"))
    wrap(TrainingState, "finish_epoch", lambda: end_at("evaluated"))


def wait_for(path: str) -> None:
    while path and not Path(path).exists():
        time.sleep(0.02)


COUNT = {"steps": 0, "agree": 0, "generation": 0}


def wrap(module: Any, name: str, before: Any) -> None:
    """Call a function before another one."""
    whole = getattr(module, name)

    def both(*args: Any, **more: Any) -> Any:
        if name == "_agree":
            COUNT["agree"] += 1
            COUNT["generation"] = args[0].generation
        if name == "summed_loss":
            COUNT["steps"] += 1
        before()
        return whole(*args, **more)

    setattr(module, name, both)


if __name__ == "__main__":
    enter(main)
