"""Real ranks of test_clocks: they train a tiny model, and wait halfway for the test."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rackrun.training.config import Config
from rackrun.training.data.samples import Batch
from rackrun.training.world import joined
from tests.training import halves

FOLDER = Path(sys.argv[1])
exec((FOLDER / "sitecustomize.py").read_text())  # which a warm interpreter does not import


class Data(halves.Halves):
    epoch_steps = 40

    def training(self, start: int) -> Iterator[Batch]:
        for step, batch in enumerate(super().training(start), start=start):
            if step == self.epoch_steps // 2:
                (FOLDER / f"halfway-{self.ranks.rank}").write_text(str(time.time()))
                while not (FOLDER / "go").exists():
                    time.sleep(0.02)
            yield batch


config = Config(
    epochs=1, lr=0.01, log_every_steps=5, save_minutes=0.01, tensorboard=False,
    device="cpu", run_folder=os.environ["RACKRUN_RUN_FOLDER"],
)  # fmt: skip
with joined(config) as ranks:
    code = halves.ran(config, ranks, Data(ranks))
    sys.stdout.write(f"rank {ranks.rank} of {ranks.world}\n")
sys.stdout.flush()
os._exit(code)
