"""Measure what the training loop costs: its images/s over those of a bare loop, and ms a step.

    OMP_NUM_THREADS=1 python -m bench.loop [--rounds 7]

Both train the same model on the same fixed random batch; the model is small, so that its own work
does not hide what the loop costs. The loop is `python -m rackrun.catdog --synthetic` with all it
does between two steps: lr, seeds, counting, reports, metrics, TensorBoard, requests to stop. The
bare one does forward, backward and step on the batch, already normalized. They take turns in one
process. On a busy machine, use CPU seconds; what a step takes more is the difference between the
fastest tenths of the steps, which other work disturbs least.
"""

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from bench.turns import in_turn
from rackrun.catdog.model import TASK
from rackrun.catdog.recipes import CatDog
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.training.config import Config
from rackrun.training.data.open import Synthetic
from rackrun.training.data.ring import Batch
from rackrun.training.device import set_up
from rackrun.training.optimizer import make_optimizer
from rackrun.training.ranks import Ranks
from rackrun.training.stop_requests import StopRequests
from rackrun.training.task import Task
from rackrun.training.train import train
from rackrun.training.training_run import TrainingRun
from rackrun.training.world import joined

WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Settings:
    """Compare the loop with a bare one."""

    model: str = "catdog"
    """As for `python -m rackrun.catdog`."""
    width: int = 8
    """Channels of the catdog model's first stage."""
    image_size: int = 32
    """Side of the images, in pixels."""
    batch_size: int = 8
    """Images per step."""
    steps: int = 300
    """Steps in a turn, after some to warm up."""
    rounds: int = 7
    """Turns of each."""
    compile: bool = False
    """Compile the model."""

    @property
    def config(self) -> CatDog:
        """Return the training settings that both use."""
        return CatDog(
            synthetic=True,
            model=self.model,
            width=self.width,
            image_size=self.image_size,
            batch_size=self.batch_size,
            compile=self.compile,
            epochs=1,
            steps_per_epoch=WARM_UP_STEPS + self.steps + 1,
            label_smoothing=0.0,
            ema_decay=0.0,
        )


class Cost(NamedTuple):
    """Of the measured steps."""

    seconds: float
    cpu_seconds: float
    steps: list[float]
    """CPU seconds of each."""


def main(args: list[str]) -> None:
    """Print images/s of both, and the ratios."""
    bench = parse(Settings, "python -m bench.loop", args)
    images, config = bench.steps * bench.batch_size, bench.config
    ways = {"loop": partial(looped, TASK, config), "bare": partial(bare, TASK, config)}
    loops, bares = in_turn(bench.rounds, ways).values()
    loop_rate, bare_rate = (
        median(images / cost.seconds for cost in costs) for costs in (loops, bares)
    )
    print(f"median:  loop {loop_rate:8.1f}  bare {bare_rate:8.1f} images/s")
    rounds = list(zip(loops, bares, strict=True))
    wall = median(theirs.seconds / ours.seconds for ours, theirs in rounds)
    cpu = median(theirs.cpu_seconds / ours.cpu_seconds for ours, theirs in rounds)
    print(f"ratio:   {wall:.3f} by the clock, {cpu:.3f} by CPU seconds")
    loop_ms, bare_ms = (
        1e3 * tenth([step for cost in costs for step in cost.steps]) for costs in (loops, bares)
    )
    more = sorted((tenth(ours.steps) - tenth(theirs.steps)) * 1e3 for ours, theirs in rounds)
    print(
        f"a step:  {loop_ms:.3f} ms of CPU, bare {bare_ms:.3f}: {loop_ms - bare_ms:.3f} more"
        f" (by round {more[0]:.3f} to {more[-1]:.3f})"
    )


def tenth(steps: list[float]) -> float:
    """Return the longest of the fastest tenth."""
    return sorted(steps)[len(steps) // 10]


class Timed(Synthetic):
    """Synthetic data that look at the clocks at every step, once the warm-up is over.

    A step is over when the next one's batch is asked for.
    """

    def __init__(self, task: Task, config: Config, ranks: Ranks) -> None:
        super().__init__(config, task.transforms(config, 0), task.synthetic_classes, ranks)
        self.clocks = Clocks(ranks.device)
        self._last = self.steps.per_epoch - 1

    def training(self, start: int) -> Iterator[Batch]:
        """Yield the batch, at every step."""
        for step, batch in enumerate(super().training(start), start=start):
            if WARM_UP_STEPS <= step <= self._last:
                self.clocks.read(waits=step in (WARM_UP_STEPS, self._last))
            yield batch


def looped(task: Task, config: Config) -> Cost:
    """Measure the training loop."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = replace(config, run_folder=folder)
        with joined(config) as ranks, StopRequests(config.save_minutes) as requests:
            compute, data = set_up(config, ranks), Timed(task, config, ranks)
            train(TrainingRun(task, config, ranks, requests, compute, data))
            return data.clocks.cost


def bare(task: Task, config: Config) -> Cost:
    """Measure as little as training can be: forward, backward and step."""
    with joined(config) as ranks:
        compute, transforms = set_up(config, ranks), task.transforms(config, 0)
        data = Synthetic(config, transforms, task.synthetic_classes, ranks)
        images, labels, *_ = next(data.training(0))
        model = compute.placed(task.model(config, task.synthetic_classes)).train()
        optimizer = make_optimizer(model, config)
        layout = torch.channels_last if compute.channels_last else torch.contiguous_format
        inputs = transforms.normalized(images).contiguous(memory_format=layout)
        clocks, last = Clocks(compute.device), config.steps_per_epoch - 1
        for step in range(last):
            if step >= WARM_UP_STEPS:
                clocks.read(waits=step == WARM_UP_STEPS)
            with compute.autocast():
                logits = model(inputs)
            cross_entropy(logits.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        clocks.read(waits=True)
        return clocks.cost


class Clocks:
    """The clocks, read before each measured step and after the last one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wall: list[float] = []
        self._cpu: list[float] = []

    def read(self, waits: bool) -> None:
        """Look at them, after the device is done if `waits`."""
        if waits and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._wall.append(time.monotonic())
        self._cpu.append(time.process_time())

    @property
    def cost(self) -> Cost:
        """Return what lies between the readings."""
        steps = [after - before for before, after in pairwise(self._cpu)]
        return Cost(self._wall[-1] - self._wall[0], self._cpu[-1] - self._cpu[0], steps)


if __name__ == "__main__":
    run(main)
