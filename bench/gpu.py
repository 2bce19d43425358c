"""ResNet-50 on a GPU: images/s eager and compiled, the loop against a bare step, copies.

    python -m bench.gpu [--batch-size 256] [--steps 50] [--rounds 3]

loop     `imagenet --synthetic` with all it does between two steps, against forward, backward and
         update of the same model on the same batch, already normalised; in turn, medians
memory   what an image moves if every operation reads and writes in full, against the bandwidth
         that the maker gives; a compiled model moves less, so for it this is a bound
copies   steps on batches that come from pinned memory as training copies them, against the same
         steps on one batch that stays; meanwhile torch raises if anything waits for the GPU

Without a GPU it prints that, and measures nothing. No figures have been measured yet.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, repeat

import torch
from torch.nn.functional import cross_entropy

from bench.loop import WARM_UP_STEPS, bare, looped
from imagenet.model import TASK
from imagenet.recipes import ImageNet
from rackrun.commandline import parse, run
from training.data.loader import on_device
from training.data.open import Synthetic
from training.data.samples import Batch
from training.device import set_up
from training.monitor.profile import memory_traffic, peak
from training.ranks import Ranks, joined
from training.state import TrainingState


@dataclass(frozen=True)
class Settings:
    """ResNet-50 on a GPU."""

    batch_size: int = 256
    """Images per step."""
    steps: int = 50
    """Steps of each measurement, after some to warm up."""
    rounds: int = 3
    """Times that each is measured; medians count."""


def main(args: list[str]) -> None:
    """Print all measurements, or that there is no GPU."""
    settings = parse(Settings, "python -m bench.gpu", args)
    if not torch.cuda.is_available():
        print("no GPU: not measured")
        return
    config = ImageNet(
        synthetic=True,
        batch_size=settings.batch_size,
        epochs=1,
        steps_per_epoch=WARM_UP_STEPS + settings.steps + 1,
    )
    with joined(config) as ranks:
        traffic, bandwidth = bytes_per_image(config, ranks), peak(ranks.device).memory_bytes
    print(f"{torch.cuda.get_device_name()}, batches of {config.batch_size}")
    for name, one in (("eager", config), ("compiled", replace(config, compile=True))):
        rate, simple = rates(one, settings)
        share = f", {rate * traffic / bandwidth:.0%} of the bandwidth" if bandwidth else ""
        print(
            f"{name:9}{rate:9,.0f} images/s in the loop, {simple:9,.0f} bare:"
            f" {rate / simple:.3f}; {rate * traffic / 1e12:.2f} TB/s{share}"
        )
    with joined(config) as ranks:
        copies(config, ranks, settings)


def bytes_per_image(config: ImageNet, ranks: Ranks) -> float:
    """Return the memory traffic of an image, uncompiled."""
    compute, transforms = set_up(config, ranks), TASK.transforms(config, 0)
    batch = synthetic(config, ranks)
    model = compute.placed(TASK.model(config, TASK.synthetic_classes))
    return memory_traffic(model, transforms, compute, batch)


def rates(config: ImageNet, settings: Settings) -> tuple[float, float]:
    """Print the images per second of the loop, and of the bare step."""
    images = settings.steps * settings.batch_size
    turns = [(looped(TASK, config), bare(TASK, config)) for _ in range(settings.rounds)]
    loop, simple = (
        statistics.median(images / cost.seconds for cost in side)
        for side in zip(*turns, strict=True)
    )
    return loop, simple


def copies(config: ImageNet, ranks: Ranks, settings: Settings) -> None:
    """Print the time of a step with and without new batches, and of a copy alone."""
    compute, transforms = set_up(config, ranks), TASK.transforms(config, 0)
    state = TrainingState(compute.placed(TASK.model(config, TASK.synthetic_classes)), config)
    batch = synthetic(config, ranks)
    images, labels = (part.cpu().pin_memory() for part in batch[:2])
    pinned = batch._replace(images=images, labels=labels)

    def step(batch: Batch) -> None:
        logits = compute.logits(state.model, transforms, batch.images)
        cross_entropy(logits, batch.labels).backward()
        state.advance()

    def fresh() -> Iterator[Batch]:
        return on_device(repeat(pinned), ranks.device)

    stays = seconds_per_step(repeat(batch), step, settings.steps)
    arrives = seconds_per_step(fresh(), step, settings.steps)
    alone = seconds_per_step(fresh(), lambda batch: None, settings.steps)
    print(
        f"a step on a batch that stays {stays * 1e3:.2f} ms, on one that is copied"
        f" {arrives * 1e3:.2f} ms; a copy alone {alone * 1e3:.2f} ms, of which"
        f" {min(max(1 - (arrives - stays) / alone, 0), 1):.0%} is hidden"
    )


def seconds_per_step(batches: Iterator[Batch], step: Callable[[Batch], None], steps: int) -> float:
    """Return the mean time of a step, in which nothing waits for the GPU: torch would raise."""
    for number, batch in enumerate(islice(batches, WARM_UP_STEPS + steps)):
        if number == WARM_UP_STEPS:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            torch.cuda.set_sync_debug_mode("error")
        step(batch)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


def synthetic(config: ImageNet, ranks: Ranks) -> Batch:
    """Return the batch of --synthetic, on the device."""
    data = Synthetic(config, TASK.transforms(config, 0), TASK.synthetic_classes, ranks)
    return next(data.training(0))


if __name__ == "__main__":
    run(main)
