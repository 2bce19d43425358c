"""python -m training ledger RUN: prove that each epoch of a run was exactly the data set."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from shards.commandline import parse, run
from shards.errors import DataError, Problem, UsageError
from training.config import Config

if TYPE_CHECKING:
    from training.ledger import Rows, Verdict
    from training.pool import Pool


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
            print(verdict, *keys(self.run_folder, verdict), sep="\n  ")
        wrong = sum(not verdict.exact for verdict in found)
        if wrong:
            raise DataError(f"{self.run_folder}: {wrong} of {len(found)} epochs are not exact")


def keys(run_folder: Path, verdict: "Verdict") -> Iterator[str]:
    """Names of the first samples that an epoch lacks or has too often, if the data are there."""
    if verdict.missing.size + verdict.extra.size == 0:
        return
    from training.ledger import NAMED

    pool = pool_of(run_folder)
    with suppress(Problem):
        for what, rows in (("missing", verdict.missing), ("too often", verdict.extra)):
            for row in rows[:NAMED].tolist():
                shard, sample = pool.read(row, 1)[row]
                yield f"{what}: row {row} is {sample.key} in {shard}"


def chosen(run_folder: Path, epochs: int) -> "dict[int, Rows] | None":
    """By epoch, how often each row had to come; None when the run took all of them once."""
    config = settings_of(run_folder)
    if not config.chooses:
        return None
    import numpy as np

    from training.pool import training_mixture

    pool = pool_of(run_folder)
    mixture = training_mixture(config, pool)
    size = pool.index.size
    return {
        epoch: np.bincount(mixture.rows(epoch), minlength=size).astype(np.int32)
        for epoch in range(epochs)
    }


def pool_of(run_folder: Path) -> "Pool":
    """What a run trained on."""
    from training.pool import training_pool

    return training_pool(settings_of(run_folder))


def settings_of(run_folder: Path) -> Config:
    """The settings of a run that say what it trained on."""
    settings = json.loads((run_folder / "config.json").read_text())
    names = ("data", "seed", "only_classes", "class_weights", "first_samples", "mix")
    return Config(exact_epochs=True, **{name: settings[name] for name in names})


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
