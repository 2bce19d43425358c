"""The product's loop and the reference on the same batches, for one rank or several."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rackrun.imagenet.model import mixed
from rackrun.imagenet.recipes import ImageNet
from rackrun.run_folder import RunFolder
from rackrun.shards.cache_filler import CacheFiller
from rackrun.training import checkpoint
from rackrun.training.config import Config
from rackrun.training.data.interface import Data
from rackrun.training.data.order import Steps
from rackrun.training.data.ring import Batch
from rackrun.training.data.transforms import Transforms
from rackrun.training.device import set_up
from rackrun.training.ranks import Numbers, Ranks
from rackrun.training.stop_requests import StopRequests
from rackrun.training.task import Task
from rackrun.training.train import train
from rackrun.training.training_run import TrainingRun
from tests.training import reference
from tests.training.reference import DEVIATION, MEAN, Recipe, Samples

SIZE, PARTS, JUDGED = 8, 2, 50
EQUAL = 2e-6
"""The product normalizes images in float32 and writes six digits of a loss; all else is float64."""
OVERFLOWS = (0, 7, 8, 23)
RECIPES = {
    "sgd": Recipe(),
    "fp16": Recipe(skipped=OVERFLOWS),
    "bce": Recipe(loss="bce", lr=2.0),
    "bce above a threshold": Recipe(loss="bce", threshold=0.2, lr=2.0),
    "adamw": Recipe(optimizer="adamw", lr=0.01, weight_decay=0.5, cutmix=1.0, ema_steps=3),
    "lamb": Recipe(optimizer="lamb", lr=0.05, mixup=0.0, cutmix=1.0),
    "tails": Recipe(tails=(2, 7, 1, 5), clip=1.0, lr=0.1),
    "adamw, tails": Recipe(optimizer="adamw", lr=0.01, tails=(1, 2, 8, 1), cutmix=1.0),
}
"""fp16 has a loss that is scaled, and steps that are skipped. Tails are the last steps of exact
epochs: with two ranks or three, some of them have no sample for one or two of these."""
PLAIN = RECIPES["sgd"]
OF_RANKS = [
    name for name, recipe in RECIPES.items() if recipe is PLAIN or recipe.skipped or recipe.tails
]


class Double(nn.Module):
    """A small model that computes in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 6 * 6, PLAIN.classes),
        ).double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(images.double())
        return outputs


def model() -> Double:
    """Return a model with the same initial weights each time."""
    torch.manual_seed(11)
    return Double()


def samples(number: int, count: int) -> Samples:
    """Return random images whose labels can be seen in them."""
    random = torch.Generator().manual_seed(number)
    labels = torch.randint(PLAIN.classes, (count,), generator=random)
    images = torch.randint(200, (count, 3, SIZE, SIZE), dtype=torch.uint8, generator=random)
    images[range(count), labels % 3, labels % SIZE] = 255
    return images, labels


def judged_samples() -> Samples:
    """Return samples of which some have a wrong label, so that top-5 is not 1."""
    images, labels = samples(10_000, JUDGED)
    return images, torch.cat([labels[:30], labels[30:].roll(1)])


VALIDATION = judged_samples()


class InMemory(Data):
    """The same global batches for any number of ranks."""

    classes = tuple("abcdefghij")
    dataset = digest = "in memory"
    has_evaluation = True
    versions: dict[str, str] = {}
    cache = CacheFiller((), ())

    def __init__(self, ranks: Ranks, recipe: Recipe) -> None:
        super().__init__()
        self.mine = slice(ranks.rank, None, ranks.world)
        self.steps = Steps(recipe.epoch_steps * recipe.batch, recipe.batch, ranks.world)
        self.steps.samples_in = recipe.samples_in
        self.rows = recipe.epoch_steps * recipe.batch

    def class_sizes(self) -> Numbers:
        return np.full(len(self.classes), self.rows // len(self.classes))

    def training(self, start: int) -> Iterator[Batch]:
        step = start
        while True:
            images, labels = samples(step, self.steps.samples_in(step))
            yield Batch(images[self.mine], labels[self.mine])
            step += 1

    def evaluation(self) -> Iterator[Batch]:
        images, labels = VALIDATION
        return iter([Batch(images[self.mine], labels[self.mine])])

    def grid(self, count: int, rows: Sequence[int] = ()) -> None:
        return None


TASK = Task(
    "reference",
    lambda config, classes: model(),
    lambda config, epoch: Transforms(SIZE, mean=MEAN, deviation=DEVIATION),
    mix=mixed,
)


def settings(recipe: Recipe, world: int, folder: Path) -> ImageNet:
    """Return the recipe as settings of the product."""
    return ImageNet(
        run_folder=str(folder), image_size=SIZE, epochs=recipe.epochs, lr=recipe.lr,
        lr_schedule="cosine", warmup_epochs=recipe.warmup / recipe.epoch_steps, seed=recipe.seed,
        optimizer=recipe.optimizer, momentum=recipe.momentum, weight_decay=recipe.weight_decay,
        clip_grad=recipe.clip, label_smoothing=recipe.smoothing, loss=recipe.loss,
        bce_threshold=recipe.threshold, ema_decay=recipe.ema, ema_steps=recipe.ema_steps,
        mixup=recipe.mixup, cutmix=recipe.cutmix, device="cpu",
        precision="fp16" if recipe.skipped else "auto", batch_size=recipe.batch // world,
        grad_accum_steps=PARTS, log_every_steps=1, tensorboard=False, eval_flip=True,
        scale_lr=False,
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


def distance(ranks: Ranks, folder: Path, name: str, **options: Any) -> float:
    """Train with the product; return on rank 0 how far it ends from the reference, relatively.

    Looked at are the weights, their average, the loss of each step, and the last evaluation.
    """
    recipe = RECIPES[name]
    config = replace(settings(recipe, ranks.world, folder), **options)
    data = InMemory(ranks, recipe)
    with StopRequests(0) as requests:
        compute = set_up(config, ranks)
        task = replace(TASK, model=overflowing(ranks)) if recipe.skipped else TASK
        run = TrainingRun(task, config, ranks, requests, compute, data)
        run.class_weights = torch.tensor(recipe.weights)
        assert train(run) == 0
    return far_from_reference(folder, ranks.world, recipe) if ranks.first else 0.0


def overflowing(ranks: Ranks) -> Callable[[Config, int], nn.Module]:
    """Return what makes the model that overflows."""

    def made(config: Config, classes: int) -> nn.Module:
        torch.manual_seed(11)
        return Overflowing(ranks)

    return made


def parts_of(recipe: Recipe, world: int, step: int) -> list[list[Samples]]:
    """Return the parts of a step's batch by rank: as many as its largest share needs."""
    images, labels = samples(step, recipe.samples_in(step))
    share = -(-len(labels) // world)
    count = -(-share * PARTS * world // recipe.batch)
    split = [
        (images[rank::world].tensor_split(count), labels[rank::world].tensor_split(count))
        for rank in range(world)
    ]
    return [[part for part in zip(*both, strict=True) if len(part[1])] for both in split]


def far_from_reference(folder: Path, world: int, recipe: Recipe) -> float:
    """Return the largest relative difference of what a run has written."""
    expected = reference.trained(model(), partial(parts_of, recipe, world), recipe)
    state = checkpoint.read(RunFolder(folder).checkpoint(recipe.steps))["state"]
    lines = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    last = [line for line in lines if line["kind"] == "evaluate"][-1]
    by_file = [last[name] for name in ("loss", "top1", "top5")]
    evaluations = reference.evaluated(model(), expected.average, VALIDATION)
    return max(
        *(far(state["model"][name], weight) for name, weight in expected.weights.items()),
        *(far(state["average"][name], weight) for name, weight in expected.average.items()),
        far(torch.tensor(losses), torch.tensor(expected.losses)),
        *(
            abs(actual - expected_value) / expected_value
            for actual, expected_value in zip(by_file, evaluations, strict=True)
        ),
    )


def far(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((result - expected).abs().max() / expected.abs().max())
