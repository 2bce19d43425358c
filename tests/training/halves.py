"""A small training on synthetic batches, the same whatever the world, for tests on ranks."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from rackrun.run_folder import RunFolder
from rackrun.shards.cache_filler import CacheFiller
from rackrun.training import checkpoint
from rackrun.training.config import Config
from rackrun.training.data.interface import Data
from rackrun.training.data.samples import Batch
from rackrun.training.data.transforms import Transforms
from rackrun.training.device import set_up
from rackrun.training.ranks import Numbers, Ranks
from rackrun.training.run.resume import resumed
from rackrun.training.setup import TrainingRun
from rackrun.training.stop_requests import StopRequests
from rackrun.training.task import Task
from rackrun.training.train import train

CLASSES, SIZE, GLOBAL_BATCH = 3, 8, 16


def model(config: Config, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 6 * 6, 12),
        nn.Linear(12, classes),
    )


CONFIG = Config(
    epochs=2, lr=0.05, warmup_epochs=0.5, weight_decay=0.01, clip_grad=0.5, ema_decay=0.9,
    grad_accum_steps=2, tensorboard=False, device="cpu", log_every_steps=2,
)  # fmt: skip
TASK = Task("tiny", model, lambda config, epoch: Transforms(SIZE))


class Halves(Data):
    """The same global batches whatever the world; each rank takes its part of them."""

    classes = ("a", "b", "c")
    dataset = digest = "halves"
    epoch_steps = 6
    batch = GLOBAL_BATCH
    rows = 6 * GLOBAL_BATCH
    has_evaluation = True
    versions: dict[str, str] = {}
    cache = CacheFiller((), ())

    def __init__(self, ranks: Ranks, signalled: tuple[int, int] = (-1, -1)) -> None:
        super().__init__(ranks)
        self.ranks = ranks
        self.signalled = signalled  # rank, step

    def class_sizes(self) -> Numbers:
        return np.full(len(self.classes), self.rows // len(self.classes))

    def training(self, start: int) -> Iterator[Batch]:
        step = start
        while True:
            if self.signalled == (self.ranks.rank, step):
                os.kill(os.getpid(), signal.SIGTERM)
            random = torch.Generator().manual_seed(step)
            shape = (GLOBAL_BATCH, 3, SIZE, SIZE)
            images = torch.randint(256, shape, dtype=torch.uint8, generator=random)
            labels = torch.randint(CLASSES, (GLOBAL_BATCH,), generator=random)
            part = slice(self.ranks.rank, None, self.ranks.world)
            yield Batch(images[part], labels[part])
            step += 1

    def evaluation(self) -> Iterator[Batch]:
        return iter([next(self.training(10_000 + self.ranks.rank))])

    def grid(self, count: int, rows: Sequence[int] = ()) -> None:
        return None


def ran(config: Config, ranks: Ranks, data: Halves, task: Task = TASK) -> int:
    config = replace(config, batch_size=GLOBAL_BATCH // ranks.world)
    earlier = resumed(config.resume, TASK.name, ranks) if config.resume else None
    with StopRequests(config.save_minutes) as stops:
        return train(TrainingRun(task, config, ranks, stops, set_up(config, ranks), data, earlier))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = checkpoint.read(folder / "final.pt")["model"]
    return state


def curve(folder: Path) -> list[float]:
    """Return the training losses that a run has recorded."""
    lines = map(json.loads, RunFolder(folder).metrics.read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]
