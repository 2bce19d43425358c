"""Real ranks of test_stragglers: they train a tiny model; rank 1 sleeps in its data."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rackrun.training.config import Config
from rackrun.training.data.samples import Batch
from rackrun.training.world import joined
from tests.training import halves

SLEEP_SECONDS = 0.1


class Data(halves.Halves):
    epoch_steps = 30

    def training(self, start: int) -> Iterator[Batch]:
        for batch in super().training(start):
            time.sleep(SLEEP_SECONDS * (self.ranks.rank == 1))
            yield batch


halves.GLOBAL_BATCH = Data.batch = 15  # for three ranks
config = Config(
    epochs=1, lr=0.01, log_every_steps=5, tensorboard=False, device="cpu",
    run_folder=str(Path(os.environ["RACKRUN_RUN_FOLDER"])),
)  # fmt: skip
with joined(config) as ranks:
    code = halves.ran(config, ranks, Data(ranks))
sys.stdout.flush()
os._exit(code)
