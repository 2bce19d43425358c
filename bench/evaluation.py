"""Measure what finding the images of the highest loss adds to an evaluation.

    python -m bench.evaluation [--images 1200 --width 16 --rounds 21]

The evaluation of a training run with and without it, in turn, in one process: read, decoded, and
computed by the small model of the demo. A larger model makes the share smaller.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from bench.peers import write_images
from catdog.model import TASK
from catdog.recipes import CatDog
from convert.folder import FolderOfClasses
from convert.options import Packing
from rackrun.commandline.parser import parse
from training.counts import HighestLosses
from training.phases import evaluate as evaluation
from training.phases.begin import begin, new_state
from training.phases.start import started
from training.ranks import Ranks


@dataclass(frozen=True)
class Settings:
    """Measure the cost of the images with the highest loss."""

    images: int = 1200
    """Validation images of about 110 KB."""
    width: int = 16
    """Channels of the catdog model's first stage."""
    rounds: int = 21
    """Pairs of evaluations."""


class Timed(HighestLosses):
    """Finds them, and counts the CPU seconds of it."""

    seconds = 0.0

    def add(self, logits: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Keep the losses of a batch."""
        with counted():
            super().add(logits, labels, rows)

    def rows_of_all(self, ranks: Ranks, count: int) -> list[int]:
        """Return the rows of the highest."""
        with counted():
            return super().rows_of_all(ranks, count)


@contextmanager
def counted() -> Iterator[None]:
    """Add what the block takes to the CPU seconds of `Timed`."""
    before = time.process_time()
    yield
    Timed.seconds += time.process_time() - before


class Idle(HighestLosses):
    """Finds none."""

    def add(self, logits: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Keep nothing."""


def main(settings: Settings) -> None:
    """Print the medians of both, and of the differences within pairs."""
    with tempfile.TemporaryDirectory() as name:
        config = CatDog(
            data=str(converted(Path(name), settings.images)), width=settings.width, epochs=1,
            workers=0, eval_split="train", device="cpu", run_folder=f"{name}/run",
        )  # fmt: skip
        with started(TASK, config) as run:
            state = new_state(run)
            with begin(run, state) as log:

                def cost(losses: type[HighestLosses]) -> float:
                    with patch.object(evaluation, "HighestLosses", losses):
                        before = time.process_time()
                        evaluation.evaluate(run, state, log)
                        return time.process_time() - before

                cost(Idle)  # to warm up
                pairs = []
                for number in range(settings.rounds):
                    turn = (Timed, Idle) if number % 2 else (Idle, Timed)
                    costs = {losses: cost(losses) for losses in turn}
                    pairs.append((costs[Idle], costs[Timed]))
    without = statistics.median(pair[0] for pair in pairs)
    quarters = statistics.quantiles((after - before for before, after in pairs), n=4)
    low, middle, high = (quarter / without for quarter in quarters)
    calls = Timed.seconds / settings.rounds
    print(f"an evaluation of {settings.images} images without: {without:.3f} CPU seconds (median)")
    print(f"with: {middle:+.2%} (median of the pairs; quartiles {low:+.2%} and {high:+.2%})")
    print(
        f"the calls alone: {calls / without:.2%}, {calls / settings.images * 1e6:.1f} us per image"
    )


def converted(root: Path, images: int) -> Path:
    """Return a folder of shards with that many images in one split."""
    sys.stderr.write("drawing images\n")
    packing = Packing(shards=4, val_percent=0)
    FolderOfClasses(write_images(root, images), root / "shards", packing=packing).run()
    return root / "shards"


if __name__ == "__main__":
    main(parse(Settings, "python -m bench.evaluation", sys.argv[1:]))
