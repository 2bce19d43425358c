"""Started by test_stragglers: rank 1 sleeps in its data, in its arithmetic, or not at all."""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import nn

from rackrun.training.config import Config
from rackrun.training.data.samples import Batch
from rackrun.training.ranks import Ranks
from rackrun.training.world import joined
from tests.training import two_ranks

SECONDS = 0.08


class SlowData(two_ranks.Halves):
    def training(self, start: int) -> Iterator[Batch]:
        for batch in super().training(start):
            time.sleep(SECONDS * self.ranks.rank)
            yield batch


class Slow(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images):
        time.sleep(SECONDS * int(os.environ["RANK"]))
        return self.model(images)


def ran(name: str, config: Config, ranks: Ranks, folder: Path) -> None:
    config = replace(
        config, run_folder=str(folder / name), straggler_steps=0 if name == "off" else 10
    )
    data = (SlowData if name == "data" else two_ranks.Halves)(ranks)
    task = two_ranks.TASK
    if name == "compute":
        task = replace(task, model=lambda *args: Slow(two_ranks.model(*args)))
    assert two_ranks.ran(config, ranks, data, task) == 0


def main(folder: Path) -> None:
    two_ranks.Halves.epoch_steps = 21
    config = Config(epochs=1, lr=0.01, log_every_steps=1, tensorboard=False, device="cpu")
    with joined(config) as ranks:
        for name in ("data", "compute", "off"):
            ran(name, config, ranks, folder)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
