"""On the way to the device, and in a step, nothing waits for a number from the device."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rackrun.imagenet.model import TASK
from rackrun.imagenet.recipes import RECIPES
from rackrun.run_folder import RunFolder
from rackrun.training.data.loader import on_device
from rackrun.training.data.open import Synthetic
from rackrun.training.data.ring import Batch
from rackrun.training.device import Compute
from rackrun.training.ranks import Ranks
from rackrun.training.scores import Table
from rackrun.training.state import TrainingState
from rackrun.training.stop_requests import StopRequests
from rackrun.training.train import step
from rackrun.training.training_run import TrainingRun

CPU = torch.device("cpu")
NUMBERLESS = torch.device("meta")  # tensors without values: reading one raises


def numbered(asked: list[int]) -> Iterator[Batch]:
    """Yield batches 0, 1, …; note when each is requested."""
    for number in range(5):
        asked.append(number)
        yield Batch(torch.full((2, 3, 4, 4), number, dtype=torch.uint8), torch.full((2,), number))


def test_every_batch_arrives_in_order_and_the_next_one_is_on_its_way():
    """While a step works on a batch, the next one is already there."""
    asked: list[int] = []
    for number, batch in enumerate(on_device(numbered(asked), CPU)):
        assert batch.labels.tolist() == [number] * 2 and int(batch.images[0, 0, 0, 0]) == number
        assert asked[-1] == min(number + 1, 4)
    assert asked == list(range(5))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("default", {"clip_grad": 1.0, "grad_accum_steps": 2}), ("timm-a3", {})],
    ids=str,
)
def test_a_step_asks_the_device_for_nothing(recipe, options, tmp_path):
    """All of a step, mixing, clipping and the average included, runs where tensors have no values.

    So no step but the first, whose outputs are looked at, waits for the device between two lines of
    the log.
    """
    config = replace(
        RECIPES[recipe](
            model="resnet18", batch_size=4, image_size=32, evaluation_size=32, grad_accum_steps=1
        ),
        **options,
    )  # fmt: skip
    ranks = Ranks(0, 1, 0, 1, NUMBERLESS)
    compute = Compute(CPU, precision="bf16", channels_last=True, compile=False)
    batch = Batch(
        torch.empty((4, 3, 32, 32), dtype=torch.uint8, device=NUMBERLESS),
        torch.empty(4, dtype=torch.int64, device=NUMBERLESS),
    )
    data = Synthetic(config, TASK.transforms(config, 0), 10, Ranks(0, 1, 0, 1, CPU))
    run = TrainingRun(TASK, config, ranks, StopRequests(0), compute, data)
    run.state = TrainingState(TASK.model(config, 10).to(NUMBERLESS), config)
    run.log.folder = RunFolder(tmp_path)
    run.is_unseen, run.state.step = False, 1
    for _ in range(2):
        run.state.set_lr(0.1)
        run.exchange.begin()
        step(run, batch, config.grad_accum_steps, TASK.transforms(config, 0))
    with pytest.raises((RuntimeError, NotImplementedError)):
        run.sums.tolist()  # the line of the log is the one that asks


def test_counting_a_batch_of_an_evaluation_asks_the_device_for_nothing():
    """So the next batch is on its way to a GPU while it works on this one."""
    logits = torch.empty((4, 10), device=NUMBERLESS)
    labels = torch.empty(4, dtype=torch.int64, device=NUMBERLESS)
    batch = Batch(torch.empty((4, 3, 8, 8), device=NUMBERLESS), labels)
    Table(10).add(logits, batch)
