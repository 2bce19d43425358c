"""python -m training ledger RUN: prove that each epoch of a run was exactly the data set."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from shards.commandline import parse, run
from shards.errors import DataError, UsageError

if TYPE_CHECKING:
    from training.ledger import Rows


@dataclass(frozen=True)
class Ledger:
    """Hold what the ranks of a run trained on against the data set, epoch by epoch."""

    run_folder: Positional[Path]
    """Folder of a run that was trained with --exact-epochs --ledger."""

    def run(self) -> None:
        """Print a line per epoch; DataError when one of them is not exact."""
        from training.ledger import read, verdicts

        intervals = read(self.run_folder / "ledger")
        if not intervals:
            raise UsageError(
                f"{self.run_folder}: there is no ledger in it; train with --exact-epochs --ledger"
            )
        last = max(interval.last for interval in intervals)
        epochs = -(-last // intervals[0].epoch_steps)
        found = verdicts(intervals, chosen(self.run_folder, epochs))
        for verdict in found:
            print(verdict)
        wrong = sum(not verdict.exact for verdict in found)
        if wrong:
            raise DataError(f"{self.run_folder}: {wrong} of {len(found)} epochs are not exact")


def chosen(run_folder: Path, epochs: int) -> "dict[int, Rows] | None":
    """By epoch, how often each row had to come; None when the run took all of them once."""
    settings = json.loads((run_folder / "config.json").read_text())
    names = ("only_classes", "class_weights", "first_samples", "mix")
    if not any(settings[name] for name in names):
        return None
    import numpy as np

    from training.config import Config
    from training.pool import training_mixture, training_pool

    config = Config(
        exact_epochs=True, **{name: settings[name] for name in (*names, "data", "seed")}
    )
    pool = training_pool(config)
    mixture = training_mixture(config, pool)
    size = pool.index.size
    return {
        epoch: np.bincount(mixture.rows(epoch), minlength=size).astype(np.int32)
        for epoch in range(epochs)
    }


def main(args: list[str]) -> None:
    """Do what the first word says."""
    if args[:1] in (["-h"], ["--help"]):
        print(f"usage: {__doc__}")
    elif args[:1] == ["ledger"]:
        parse(Ledger, "python -m training ledger", args[1:]).run()
    else:
        raise UsageError("type python -m training ledger RUN; python -m catdog trains")


if __name__ == "__main__":
    run(main)
