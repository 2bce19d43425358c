"""Measure training on one GPU: rates and loading.

    python -m bench.gpu [--batch-size 256] [--steps 30] [--rounds 2] [--only rates --only shards]

rates       `imagenet --synthetic` with all it does between two steps, against forward, backward and
            update of the same model on the same batch, already normalized, in bfloat16 and float16,
            as it is and compiled; in turn, medians
shards      steps on batches that loader workers decode from shards of 110 KB images, against the
            same steps on one batch that stays, and the workers alone: what they deliver, and what
            the steps wait; meanwhile torch raises if anything waits for the GPU

Parts that have not begun after --minutes are left out, and named. With --device cpu they run on a
CPU, to try them. No figures have been measured on a GPU yet.
"""

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Literal

import torch
from torch.nn.functional import cross_entropy

from bench.images import write_shards
from bench.loop import WARM_UP_STEPS, bare, looped
from bench.turns import in_turn
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.errors import UsageError
from rackrun.imagenet.model import TASK
from rackrun.imagenet.recipes import ImageNet
from rackrun.training.data.open import Synthetic, open_data
from rackrun.training.data.ring import Batch
from rackrun.training.device import set_up
from rackrun.training.ranks import Ranks
from rackrun.training.state import TrainingState
from rackrun.training.world import joined
from rackrun.user_code.sources import nearest

PRECISIONS = ("bf16", "fp16")


@dataclass(frozen=True)
class Settings:
    """ResNet-50 on a GPU."""

    model: str = "resnet50"
    """Model of torchvision."""
    image_size: int = 224
    """Side of the images (pixels)."""
    batch_size: int = 256
    """Images per step."""
    steps: int = 30
    """Steps of each measurement, after some to warm up."""
    rounds: int = 2
    """Times that each rate is measured; medians count."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the GPU; cpu: try all of it without one."""
    only: tuple[str, ...] = ()
    """Parts to measure; none: all."""
    minutes: float = 9.0
    """Time after which no further part begins."""
    images: int = 4000
    """Images in the shards."""

    @property
    def config(self) -> ImageNet:
        """Return the training settings for fixed random images."""
        return ImageNet(
            synthetic=True,
            model=self.model,
            image_size=self.image_size,
            batch_size=self.batch_size,
            device=self.device,
            epochs=1,
            steps_per_epoch=WARM_UP_STEPS + self.steps + 1,
        )


class Bench:
    """A model on a device, and the batch of --synthetic."""

    def __init__(self, config: ImageNet, ranks: Ranks, steps: int) -> None:
        self.ranks, self.steps = ranks, steps
        self.compute, self.transforms = set_up(config, ranks), TASK.transforms(config, 0)
        model = self.compute.placed(TASK.model(config, TASK.synthetic_classes))
        self.state = TrainingState(model, config, float16=self.compute.precision == "fp16")
        data = Synthetic(config, self.transforms, TASK.synthetic_classes, ranks)
        self.batch = next(data.training(0))

    def step(self, batch: Batch) -> None:
        """Take a step."""
        logits = self.compute.logits(self.state.model, self.transforms.normalized, batch.images)
        torch.autograd.backward(self.state.scaler.scale(cross_entropy(logits, batch.labels)))
        self.state.advance()

    def seconds(self, batches: Iterator[Batch], act: Callable[[Batch], None]) -> float:
        """Return the mean time of `act` on a batch; torch raises if it waits for the GPU."""
        on_gpu = self.ranks.device.type == "cuda"
        for number, batch in enumerate(islice(batches, WARM_UP_STEPS + self.steps)):
            if number == WARM_UP_STEPS:
                settle(on_gpu)
                begin = time.perf_counter()
                refuse_waits(on_gpu)
            act(batch)
        refuse_waits(False)
        settle(on_gpu)
        return (time.perf_counter() - begin) / self.steps


def settle(on_gpu: bool) -> None:
    """Wait for what the GPU has to do."""
    if on_gpu:
        torch.cuda.synchronize()


def refuse_waits(refused: bool) -> None:
    """Have torch raise where the host waits for the GPU, or not."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error" if refused else "default")


def main(args: list[str]) -> None:
    """Print all measurements, or that there is no GPU."""
    settings = parse(Settings, "python -m bench.gpu", args)
    if unknown := set(settings.only) - PARTS.keys():
        raise UsageError(f"--only {min(unknown)}: no such part; {nearest(min(unknown), PARTS)}")
    if settings.device != "cpu" and not torch.cuda.is_available():
        print("no GPU: not measured")
        return
    on_gpu = settings.device != "cpu"
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{name}, torch {torch.__version__}, {settings.model}, batches of {settings.batch_size}")
    begun = time.monotonic()
    for part in settings.only or PARTS:
        if time.monotonic() - begun > 60 * settings.minutes:
            print(f"\n{part}: left out, {settings.minutes:g} minutes are over")
            continue
        print(f"\n{part}", flush=True)
        PARTS[part](settings)
    print(f"\n{time.monotonic() - begun:.0f} s in all")


def rates(settings: Settings) -> None:
    """Print images/s of the loop and of bare steps."""
    config = settings.config
    for precision in PRECISIONS:
        for name, variant in (("eager", config), ("compiled", replace(config, compile=True))):
            loop, simple = medians(replace(variant, precision=precision), settings)
            print(
                f"{precision} {name:9}{loop:9,.0f} images/s in the loop, {simple:9,.0f} bare:"
                f" {loop / simple:.3f}",
                flush=True,
            )


def medians(config: ImageNet, settings: Settings) -> tuple[float, float]:
    """Return the images per second of the loop, and of the bare step."""
    ways = {"loop": partial(looped, TASK, config), "bare": partial(bare, TASK, config)}
    loop, simple = in_turn(settings.rounds, ways).values()
    images = settings.steps * settings.batch_size
    return (
        statistics.median(images / cost.seconds for cost in loop),
        statistics.median(images / cost.seconds for cost in simple),
    )


def shards(settings: Settings) -> None:
    """Print images/s of steps on decoded images, and of the loader workers alone."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            shards = write_shards(Path(folder), settings.images, shards=16)
        plain = replace(settings.config, synthetic=False, data=str(shards), steps_per_epoch=0)
        for exact in (False, True):
            config = replace(plain, exact_epochs=exact, epochs=1000)
            with joined(config) as ranks:
                bench = Bench(settings.config, ranks, settings.steps)
                stays = bench.seconds(repeat(bench.batch), bench.step)
                arrives = bench.seconds(batches(config, ranks), bench.step)
                alone = bench.seconds(batches(config, ranks), lambda batch: None)
            size = settings.batch_size
            print(
                f"{'exact epochs' if exact else 'resampled':13}{size / arrives:9,.0f} images/s, on"
                f" a batch that stays {size / stays:9,.0f}; loader workers alone"
                f" {size / alone:9,.0f}; steps wait {max(arrives - stays, 0) / arrives:.1%}",
                flush=True,
            )


def batches(config: ImageNet, ranks: Ranks) -> Iterator[Batch]:
    """Yield the batches of training, on the device."""
    data = open_data(
        config,
        ranks,
        [TASK.transforms(config, 0)],
        TASK.name,
        0,
    )
    yield from (batch for batch in data.training(0) if len(batch.labels) == config.batch_size)


PARTS: dict[str, Callable[[Settings], None]] = {part.__name__: part for part in (rates, shards)}


if __name__ == "__main__":
    run(main)
