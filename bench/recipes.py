"""Compare training recipes on small real data: accuracy, and images/s of the whole loop.

    OMP_NUM_THREADS=1 python -m bench.recipes [--epochs 12] [--seeds 0 --seeds 1] [--only timm-a3]

Each recipe of ImageNet, and some changes of one, trains a small residual network (20,000 weights)
on 1,437 of scikit-learn's digits, and is evaluated on the other 360: real handwriting, 28 x 28
pixels from 8 x 8. What a recipe counts in epochs (warm-up, steps of the rate, growing images) and
the span of its average are shortened to these epochs, and its images are scaled to sides of up to
24 pixels. Its learning rate follows the batch: in proportion with SGD, else with the square root.
Nothing is mirrored, as digits are not. One process, no loader workers.
"""

import contextlib
import io
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, conv1x1

from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.convert.mnist import MnistFiles
from rackrun.imagenet.model import TASK
from rackrun.imagenet.recipes import RECIPES, ImageNet
from rackrun.training import loop
from tests.mnist.digits import TRAINED_ON, files, write

SIDE = 24  # of evaluated images; those of training are in the recipe's proportion to it (pixels)
LARGE = 256
OF_EIGHT = 8  # the ranks that recipes are published for


@dataclass(frozen=True)
class Settings:
    """Compare training recipes on scikit-learn's digits."""

    epochs: int = 12
    """Epochs of each run."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """A run of each recipe with each of these."""
    batch_size: int = 64
    """Images per step."""
    only: tuple[str, ...] = ()
    """Rows of the table; all if none is given."""


class Row(NamedTuple):
    """A row of the table: a recipe, and what is changed in it."""

    recipe: str
    changes: dict[str, Any] = {}
    batch_size: int = 0
    """Images per step; 0: as the command says."""


ROWS = {
    "default": Row("default"),
    "default, AdamW": Row("default", {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.05}),
    **{name: Row(name) for name in ("torchvision-v2", "timm-a3")},
    f"default, {LARGE} images per step": Row("default", {}, LARGE),
    f"LAMB, {LARGE} images per step": Row(
        "default",
        {"optimizer": "lamb", "lr": 1e-3, "weight_decay": 0.02, "lr_schedule": "polynomial"},
        LARGE,
    ),
    **{name: Row(name) for name in ("ffcv16", "torchvision-v1")},
}


class SmallResNet(nn.Sequential):
    """Three residual blocks of torchvision: float (B, 3, S, S) -> (B, classes)."""

    def __init__(self, num_classes: int) -> None:
        stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        super().__init__(stem, nn.BatchNorm2d(8), nn.ReLU())
        for inputs, outputs in ((8, 8), (8, 16), (16, 32)):
            self.append(block(inputs, outputs))
        self.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes)])


def block(inputs: int, outputs: int) -> BasicBlock:
    """Return a residual block, which halves images when it has more outputs than inputs."""
    if inputs == outputs:
        return BasicBlock(inputs, outputs)
    shortcut = nn.Sequential(conv1x1(inputs, outputs, 2), nn.BatchNorm2d(outputs))
    return BasicBlock(inputs, outputs, 2, shortcut)


class Outcome(NamedTuple):
    """Of one run."""

    accuracy: float
    images_per_second: float


def main(args: Sequence[str]) -> None:
    """Print a line for each recipe: the median of its accuracies and their range, images/s."""
    settings = parse(Settings, "python -m bench.recipes", args)
    print(
        f"{TRAINED_ON:,} digits, {settings.epochs} epochs, {len(settings.seeds)} seeds,"
        f" {torch.get_num_threads()} threads\n"
        f"{'recipe':28}  accuracy   lowest  highest  images/s",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        data = shards(Path(name))
        for title in settings.only or ROWS:
            outcomes = [
                trained(scaled(ROWS[title], settings), data, seed, Path(name) / f"{title}-{seed}")
                for seed in settings.seeds
            ]
            print(line(title, outcomes), flush=True)


def line(title: str, outcomes: Sequence[Outcome]) -> str:
    """Return a line of the table."""
    accuracies, speeds = zip(*outcomes, strict=True)
    middle = statistics.median(accuracies)
    return (
        f"{title:28}  {middle:8.2%}  {min(accuracies):7.2%}  {max(accuracies):7.2%}"
        f"  {statistics.median(speeds):8,.0f}"
    )


def shards(root: Path) -> Path:
    """Return a folder of shards with the digits, made below this one."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        MnistFiles(write(root / "raw", files()), root / "shards").run()
    return root / "shards"


def scaled(row: Row, settings: Settings) -> ImageNet:
    """Return a recipe for few epochs of small images, and for the batch of one rank."""
    recipe = replace(RECIPES[row.recipe](), **row.changes)
    batch = row.batch_size or settings.batch_size
    shorter = settings.epochs / recipe.epochs
    pixels = SIDE / recipe.judged_size
    grows = bool(recipe.start_image_size)
    begins = recipe.grow_from_epoch or recipe.epochs // 2  # at once, as small sides grow in a step
    return replace(
        recipe,
        model="bench.recipes:SmallResNet",
        epochs=settings.epochs,
        batch_size=batch,
        lr=rate(recipe, batch),
        scale_lr=False,
        grad_accum_steps=1,
        warmup_epochs=recipe.warmup_epochs * shorter,
        step_epochs=max(round(recipe.step_epochs * shorter), 1),
        grow_from_epoch=round(begins * shorter) if grows else 0,
        grow_until_epoch=round(begins * shorter) + 1 if grows else 0,
        image_size=round(recipe.image_size * pixels),
        start_image_size=round(recipe.start_image_size * pixels),
        evaluation_size=SIDE,
        short_side=round(recipe.short_side * pixels),
        flip=False,
        eval_flip=False,
        **average(recipe, settings.epochs * (TRAINED_ON // batch)),
    )


def rate(recipe: ImageNet, batch: int) -> float:
    """Return the learning rate for this batch, from that for the published one of eight ranks."""
    published = recipe.batch_size * OF_EIGHT
    power = 1.0 if recipe.optimizer == "sgd" else 0.5
    return float(recipe.lr * OF_EIGHT * (batch / published) ** power)


def average(recipe: ImageNet, steps: int) -> dict[str, Any]:
    """Return an average of the weights over the same share of a run of this many steps."""
    if not recipe.ema_decay:
        return {}
    published = recipe.epochs * 1_281_167 / (recipe.batch_size * OF_EIGHT)
    share = recipe.ema_steps / (1 - recipe.ema_decay) / published
    return {"ema_decay": max(1 - 1 / (share * steps), 0.0), "ema_steps": 1}


def trained(recipe: ImageNet, data: Path, seed: int, folder: Path) -> Outcome:
    """Train, and return what the last evaluation and the steps have come to."""
    config = replace(
        recipe,
        data=str(data),
        run_folder=str(folder),
        eval_split="test",
        eval_every_epochs=recipe.epochs,
        save_every_epochs=recipe.epochs,
        log_every_steps=10,
        tensorboard=False,
        device="cpu",
        workers=0,
        seed=seed,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        loop.run(TASK, config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [line["images_per_second"] for line in lines if line["kind"] == "train"]
    accuracy = next(line["top1"] for line in reversed(lines) if line["kind"] == "evaluate")
    return Outcome(accuracy, statistics.median(speeds))


if __name__ == "__main__":
    run(main)
