"""The product's loop and the reference on the same batches: one rank, or several by warm.ranks.

reference_ranks.py FOLDER [MUTATION]    the two are equal, or differ by the mutation
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from imagenet.mixing import mixed
from imagenet.recipes import ImageNet
from tests.training import reference
from tests.training.mutations import MUTATIONS
from tests.training.reference import DEVIATION, MEAN, Recipe, Samples
from tests.training.torchrun import prove
from training.config import Config
from training.data.samples import Batch
from training.data.transforms import Transforms
from training.device import set_up
from training.loop import train
from training.phases.start import TrainingRun
from training.ranks import Ranks
from training.run import checkpoint, report
from training.run.folder import RunFiles
from training.run.stop_requests import StopRequests
from training.schedule import make_schedule
from training.task import Task

SIZE, BATCH, PARTS, EPOCHS, JUDGED = 8, 12, 2, 4, 50
EQUAL = 2e-6
"""The product normalises images in float32 and writes six digits of a loss; all else is float64."""
DIFFERENT = 1e-3
RECIPE = Recipe()
OVERFLOWS = (0, 7, 8, 23)


class Double(nn.Module):
    """A small model that computes in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 6 * 6, RECIPE.classes),
        ).double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(images.double())
        return outputs


def model() -> Double:
    """The same fresh weights each time."""
    torch.manual_seed(11)
    return Double()


def samples(number: int, count: int) -> Samples:
    """Random images, whose labels are to be seen in them."""
    random = torch.Generator().manual_seed(number)
    labels = torch.randint(RECIPE.classes, (count,), generator=random)
    images = torch.randint(200, (count, 3, SIZE, SIZE), dtype=torch.uint8, generator=random)
    images[range(count), labels % 3, labels % SIZE] = 255
    return images, labels


def judged_samples() -> Samples:
    """Samples of which some have another label than they seem to: not all are among five."""
    images, labels = samples(10_000, JUDGED)
    return images, torch.cat([labels[:30], labels[30:].roll(1)])


VALIDATION = judged_samples()


class InMemory:
    """The same global batches for any number of ranks."""

    classes = tuple("abcdefghij")
    dataset = digest = "in memory"
    epoch_steps = RECIPE.steps // EPOCHS
    batch = BATCH
    rows = epoch_steps * BATCH
    judges = True
    lanes = 0

    def __init__(self, ranks: Ranks) -> None:
        self.mine = slice(ranks.rank, None, ranks.world)

    def samples_in(self, step: int) -> int:
        return BATCH

    def training(self, start: int) -> Iterator[Batch]:
        step = start
        while True:
            images, labels = samples(step, BATCH)
            yield Batch(images[self.mine], labels[self.mine])
            step += 1

    def evaluation(self) -> Iterator[Batch]:
        images, labels = VALIDATION
        return iter([Batch(images[self.mine], labels[self.mine])])

    def grid(self, count: int) -> None:
        return None


TASK = Task(
    "reference",
    lambda config, classes: model(),
    lambda config, epoch: Transforms(SIZE, mean=MEAN, deviation=DEVIATION),
    mix=mixed,
)


def settings(folder: Path) -> ImageNet:
    """The recipe as options of the product."""
    return ImageNet(
        run_folder=str(folder), image_size=SIZE, epochs=EPOCHS, lr=RECIPE.lr, scale_lr=False,
        lr_schedule="cosine", warmup_epochs=RECIPE.warmup / InMemory.epoch_steps, seed=RECIPE.seed,
        momentum=RECIPE.momentum, weight_decay=RECIPE.weight_decay, clip_grad=RECIPE.clip,
        label_smoothing=RECIPE.smoothing, ema_decay=RECIPE.ema, mixup=RECIPE.mixup, device="cpu",
        grad_accum_steps=PARTS, log_every_steps=1, tensorboard=False, eval_flip=True,
    )  # fmt: skip


class Overflowing(Double):
    """The model, whose gradients of some steps overflow in the last part of the last rank."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.parts = 0 if ranks.rank == ranks.world - 1 else -(10**9)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(images)
        if self.training:
            self.parts += 1
            if self.parts in [PARTS * (step + 1) for step in OVERFLOWS]:
                outputs.register_hook(lambda gradient: gradient * float("inf"))
        return outputs


def float16_distance(ranks: Ranks, folder: Path) -> float:
    """Return the distance of a run with a scaled loss, some steps of which are skipped."""

    def overflowing(config: Config, classes: int) -> nn.Module:
        torch.manual_seed(11)
        return Overflowing(ranks)

    with patch.object(sys.modules[__name__], "RECIPE", replace(RECIPE, skipped=OVERFLOWS)):
        return distance(ranks, folder, replace(TASK, model=overflowing), precision="fp16")


def binary_distance(ranks: Ranks, folder: Path, threshold: float) -> float:
    """Return the distance of a run that minimizes the binary cross-entropy of each class."""
    changed = replace(RECIPE, loss="bce", threshold=threshold, lr=2.0)
    with patch.object(sys.modules[__name__], "RECIPE", changed):
        return distance(ranks, folder, loss="bce", bce_threshold=threshold, lr=2.0)


def distance(ranks: Ranks, folder: Path, task: Task = TASK, **options: Any) -> float:
    """Train with the product; return on rank 0 how far it ends from the reference, relatively.

    Looked at are the weights, their average, the loss of each step, and the last evaluation.
    """
    config = replace(settings(folder), batch_size=BATCH // ranks.world, **options)
    data = InMemory(ranks)
    schedule = make_schedule(config, data.epoch_steps, 1)
    with StopRequests(0) as requests, patch.object(report, "write", lambda folder: folder):
        compute = set_up(config, ranks)
        weights = torch.tensor(RECIPE.weights)
        run = TrainingRun(task, config, ranks, requests, compute, data, schedule, None, weights)
        assert train(run) == 0
    return far_from_reference(folder, ranks.world) if ranks.first else 0.0


def far_from_reference(folder: Path, world: int) -> float:
    """Return the largest relative difference of what a run has written."""

    def parts(step: int) -> list[list[Samples]]:
        images, labels = samples(step, BATCH)
        return [
            list(
                zip(
                    images[rank::world].tensor_split(PARTS),
                    labels[rank::world].tensor_split(PARTS),
                    strict=True,
                )
            )
            for rank in range(world)
        ]

    expected = reference.trained(model(), parts, RECIPE)
    state = checkpoint.read(RunFiles(folder).checkpoint(RECIPE.steps))["state"]
    lines = [json.loads(line) for line in RunFiles(folder).metrics.read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    last = [line for line in lines if line["kind"] == "evaluate"][-1]
    found = [last[name] for name in ("loss", "top1", "top5")]
    judged = reference.judged(model(), expected.average, VALIDATION)
    return max(
        *(far(state["model"][name], one) for name, one in expected.weights.items()),
        *(far(state["average"][name], one) for name, one in expected.average.items()),
        far(torch.tensor(losses), torch.tensor(expected.losses)),
        *(abs(one - two) / two for one, two in zip(found, judged, strict=True)),
    )


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


def ends_like_the_reference(config: Config, ranks: Ranks, folder: Path) -> None:
    """Each number is the reference's, also where several ranks compute it."""
    far_away = distance(ranks, folder / "right")
    assert far_away < EQUAL, far_away


def float16_ends_like_the_reference(config: Config, ranks: Ranks, folder: Path) -> None:
    """Scaled, summed over parts and ranks, unscaled and clipped; and no rank skips alone."""
    far_away = float16_distance(ranks, folder / "half")
    assert far_away < EQUAL, far_away


def the_mutations_are_noticed(config: Config, ranks: Ranks, folder: Path) -> None:
    """What is wrong on several ranks only ends elsewhere."""
    for number, mutation in enumerate(one for one in MUTATIONS if one.ranks > 1):
        with mutation.made():
            far_away = distance(ranks, folder / str(number))
        assert not ranks.first or far_away > DIFFERENT, (mutation.name, far_away)


if __name__ == "__main__":
    prove(
        Config(device="cpu"),
        ends_like_the_reference,
        float16_ends_like_the_reference,
        *([the_mutations_are_noticed] if sys.argv[2:] == ["mutated"] else []),
    )
