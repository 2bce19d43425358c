"""A user's program as type checkers see it: right uses pass, wrong ones are errors.

mypy reads it with the product (`files` in pyproject.toml), where an ignored error that does not
occur is an error itself; test_installed.py has it read against the installed wheel.
"""

from collections.abc import Iterator
from pathlib import Path

from rackrun import Config, launch, load_checkpoint, load_model, open_source, report, samples, train


def rank(rate: float) -> float:
    """Do what every rank would."""
    report(step=1, loss=rate)
    return rate


def launched() -> dict[int, float]:
    """Launch a task, a command and a function."""
    launch("catdog", "--epochs", 2, nproc=2, name="mine").exit_code = 1  # type: ignore[misc]
    launch("--", "python", "train.py", hosts=Path("hosts.txt"), sync=True, env=["A=1"])
    return dict(launch(rank, 0.1, hosts="hosts.txt", max_restarts=2).returned)


def trained(folder: Path) -> float:
    """Train here, and read a checkpoint."""
    run = train("catdog", data=folder, epochs=2)
    train(Config())  # type: ignore[arg-type]
    checkpoint = load_checkpoint(run.best)
    checkpoint.weights = {}  # type: ignore[misc]
    return float(checkpoint.weights["head.bias"].sum())


def answers(folder: Path) -> Iterator[dict[str, float]]:
    """Use a trained model on a shard."""
    model = load_model(folder / "final.pt").on_best_device()
    source = open_source("data/shards", cache="/nvme")
    yield from model.predict([sample.image for sample in samples(source, "val", 0)])
    model.predict(folder)  # type: ignore[arg-type]
    model.guess()  # type: ignore[attr-defined]
    samples(folder)  # type: ignore[call-arg, arg-type]
