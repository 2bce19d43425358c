"""Started by test_ranks: what only two real ranks can show, a line per case that holds."""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rackrun.run_folder import RunFolder
from rackrun.training import checkpoint
from rackrun.training.config import Config
from rackrun.training.data.node_cache import NodeCache
from rackrun.training.data.open import Data
from rackrun.training.data.samples import Batch
from rackrun.training.data.transforms import Transforms
from rackrun.training.device import set_up
from rackrun.training.loop import train
from rackrun.training.phases.start import TrainingRun
from rackrun.training.ranks import Numbers, Ranks
from rackrun.training.run.folder import writes_to
from rackrun.training.run.resume import resumed
from rackrun.training.run.stop_requests import StopRequests
from rackrun.training.schedule import make_schedule
from rackrun.training.task import Task
from tests.lab.waiting import until
from tests.training.torchrun import prove

CLASSES, SIZE, GLOBAL_BATCH = 3, 8, 16


def model(config: Config, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 6 * 6, 12),
        nn.Linear(12, classes),
    )


TASK = Task("tiny", model, lambda config, epoch: Transforms(SIZE))


class Halves(Data):
    """The same global batches whatever the world; each rank takes its part of them."""

    classes = ("a", "b", "c")
    dataset = digest = "halves"
    epoch_steps = 6
    batch = GLOBAL_BATCH
    rows = 6 * GLOBAL_BATCH
    has_evaluation = True
    versions: dict[str, str] = {}
    cache = NodeCache((), ())

    def __init__(self, ranks: Ranks, signalled: tuple[int, int] = (-1, -1)) -> None:
        super().__init__(ranks)
        self.ranks = ranks
        self.signalled = signalled  # rank, step

    def class_sizes(self) -> Numbers:
        return np.full(len(self.classes), self.rows // len(self.classes))

    def training(self, start: int) -> Iterator[Batch]:
        step = start
        while True:
            if self.signalled == (self.ranks.rank, step):
                os.kill(os.getpid(), signal.SIGTERM)
            random = torch.Generator().manual_seed(step)
            shape = (GLOBAL_BATCH, 3, SIZE, SIZE)
            images = torch.randint(256, shape, dtype=torch.uint8, generator=random)
            labels = torch.randint(CLASSES, (GLOBAL_BATCH,), generator=random)
            part = slice(self.ranks.rank, None, self.ranks.world)
            yield Batch(images[part], labels[part])
            step += 1

    def evaluation(self) -> Iterator[Batch]:
        return iter([next(self.training(10_000 + self.ranks.rank))])

    def grid(self, count: int, rows: Sequence[int] = ()) -> None:
        return None


def ran(config: Config, ranks: Ranks, data: Halves, task: Task = TASK) -> int:
    config = replace(config, batch_size=GLOBAL_BATCH // ranks.world)
    schedule = make_schedule(config, data.epoch_steps, ranks.world)
    earlier = resumed(config.resume, TASK.name, ranks) if config.resume else None
    with StopRequests(config.save_minutes) as stops:
        return train(
            TrainingRun(task, config, ranks, stops, set_up(config, ranks), data, schedule, earlier)
        )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = checkpoint.read(folder / "final.pt")["model"]
    return state


def curve(folder: Path) -> list[float]:
    """Return the training losses that a run has recorded."""
    lines = map(json.loads, RunFolder(folder).metrics.read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def two_ranks_train_like_one(config: Config, ranks: Ranks, folder: Path) -> None:
    """Momentum, decay, clipping, parts and the average: the same weights as one process gives."""
    alone = replace(ranks, rank=0, world=1)
    if ranks.first:
        single = replace(config, run_folder=str(folder / "one"), grad_accum_steps=1)
        assert ran(single, alone, Halves(alone)) == 0
    assert ran(replace(config, run_folder=str(folder / "two")), ranks, Halves(ranks)) == 0
    if ranks.first:
        expected, result = weights(folder / "one"), weights(folder / "two")
        for name in expected:
            torch.testing.assert_close(result[name], expected[name], rtol=1e-4, atol=1e-6)
        assert curve(folder / "two") == pytest.approx(curve(folder / "one"), rel=1e-4)
        start = model(config, CLASSES).state_dict()
        assert not torch.allclose(result["0.weight"], start["0.weight"], atol=1e-3)


def a_signal_to_one_rank_stops_both_at_one_step(config: Config, ranks: Ranks, folder: Path) -> None:
    """The other rank ends after the same step, with the same code; going on gives the same bits.

    On busy cores, requests are read some steps later, but not after the end of the epoch.
    """
    stopped = replace(config, run_folder=str(folder / "stopped"))
    assert ran(stopped, ranks, Halves(ranks, signalled=(1, 8))) == 128 + signal.SIGTERM
    saved = max(RunFolder(folder / "stopped").checkpoint(9).parent.glob("step-*.pt"))
    if ranks.first:
        assert checkpoint.read(saved)["state"]["step"] in range(9, 2 * Halves.epoch_steps + 1)
    went_on = replace(config, run_folder=str(folder / "went-on"), resume=str(saved))
    assert ran(went_on, ranks, Halves(ranks)) == 0
    if ranks.first:
        expected, result = weights(folder / "two"), weights(folder / "went-on")
        assert all(torch.equal(expected[name], result[name]) for name in expected)


class Late(Halves):
    """Rank 1 gets its first batch late, and looks around before it takes it."""

    def __init__(self, ranks: Ranks, stepped: Path) -> None:
        super().__init__(ranks)
        self.stepped = stepped

    def training(self, start: int) -> Iterator[Batch]:
        if self.ranks.rank == 1 and start == 0:  # not for an evaluation
            time.sleep(0.5)
            assert not self.stepped.exists(), "rank 0 went ahead"
        yield from super().training(start)


def no_rank_steps_before_all_have_read(config: Config, ranks: Ranks, folder: Path) -> None:
    """Rank 0, which has its batch at once, has not begun a step when rank 1 gets its own."""
    stepped = folder / "stepped"

    def noticed(config: Config, classes: int) -> nn.Module:
        made = model(config, classes)
        made.register_forward_pre_hook(lambda *_: stepped.touch())
        return made

    task = replace(TASK, model=noticed)
    assert (
        ran(replace(config, run_folder=str(folder / "late")), ranks, Late(ranks, stepped), task)
        == 0
    )
    assert stepped.exists()


class Behind(Halves):
    """Gives rank 1 a batch once rank 0 computes the same step, from the third step on.

    In the second one, DDP lets the ranks agree on its buckets before it computes.
    """

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        super().__init__(ranks)
        self.folder = folder

    def training(self, start: int) -> Iterator[Batch]:
        for step, batch in enumerate(super().training(start), start=start):
            if self.ranks.rank == 1 and 1 < step < self.epoch_steps:
                until((self.folder / f"step-{step}").exists, f"rank 0 computes step {step}", 60)
            yield batch


def no_step_waits_for_requests(config: Config, ranks: Ranks, folder: Path) -> None:
    """Rank 0 computes before rank 1 sends its request, and nothing else is asked for in a step."""
    events, all_reduce = list[str](), dist.all_reduce

    def computing(*_: object) -> None:
        if ranks.first:
            (folder / f"step-{events.count('step')}").touch()
        events.append("step")

    def watched(config: Config, classes: int) -> nn.Module:
        made = model(config, classes)
        made.register_forward_pre_hook(computing)
        return made

    def noted(*given: Any, **named: Any) -> Any:
        events.append("asks" if named.get("async_op") else "waits")
        return all_reduce(*given, **named)

    ours = replace(
        config, run_folder=str(folder / "ahead"), epochs=1, grad_accum_steps=1, log_every_steps=1000
    )
    with patch.object(dist, "all_reduce", noted):
        assert ran(ours, ranks, Behind(ranks, folder), replace(TASK, model=watched)) == 0
    first = events.index("step")
    steps = events[first : first + 2 * Halves.epoch_steps - 1]
    assert steps == ["step", "asks"] * (Halves.epoch_steps - 1) + ["step"]


def gradients_lie_in_the_buckets_that_travel(config: Config, ranks: Ranks, folder: Path) -> None:
    """Those of a small model in one: DDP copies none of them before or after the exchange."""
    net = ranks.ddp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    torch.autograd.backward(net(torch.ones(1, 4)).sum())
    gradients = [weight.grad for weight in net.parameters() if weight.grad is not None]
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 1


def ranks_agree(config: Config, ranks: Ranks, folder: Path) -> None:
    """The largest number, sums, bytes and buffers are the same on both afterwards."""
    assert ranks.all_reduce_max(ranks.rank * 15) == 15
    assert ranks.all_reduce_sum(torch.tensor([1.0, ranks.rank])).tolist() == [2.0, 1.0]
    assert ranks.broadcast_bytes(b"from 0" if ranks.first else None) == b"from 0"
    assert ranks.broadcast_bytes(None if ranks.first else b"from 1", source=1) == b"from 1"
    if ranks.first:
        ranks.send_bytes(b"to 1 alone", 1)
    else:
        assert ranks.receive_bytes(0) == b"to 1 alone"
    norm = nn.BatchNorm2d(2)
    norm(torch.full((2, 2, 4, 4), float(ranks.rank)) + torch.rand(2, 2, 4, 4))
    ranks.broadcast_buffers(norm)
    observed = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(observed, norm.running_mean)
    assert torch.equal(*observed)


def norms_share_their_mean_and_get_their_own_back(
    config: Config, ranks: Ranks, folder: Path
) -> None:
    """Statistics of both ranks count alike; what each one collected can be put back, bit for bit,
    but not from another number of ranks, or from something else."""
    norm = nn.BatchNorm2d(2)
    norm(torch.rand(4, 2, 4, 4) * (1 + ranks.rank) + 10 * ranks.rank)
    ours = torch.cat([norm.running_mean, norm.running_var])
    gathered = ranks.gather_statistics(norm)
    assert gathered is not None and torch.equal(gathered[ranks.rank], ours)
    assert (gathered[0] != gathered[1]).all()
    ranks.share_statistics(norm)
    shared = torch.cat([norm.running_mean, norm.running_var])
    assert torch.equal(shared, gathered.double().mean(0).float())
    assert ranks.gather_statistics(norm) is None
    for strange in (None, gathered[:1], gathered[:, 1:], "statistics"):
        ranks.restore_statistics(norm, strange)
        assert torch.equal(torch.cat([norm.running_mean, norm.running_var]), shared)
    ranks.restore_statistics(norm, gathered)
    assert torch.equal(torch.cat([norm.running_mean, norm.running_var]), ours)


def nodes_that_share_a_disk_write_once(config: Config, ranks: Ranks, folder: Path) -> None:
    """Each rank on a node of its own: in one folder the first of them writes, in two both do."""
    node = replace(ranks, local_rank=0, local_world=1)
    shared, options = RunFolder(folder / "shared"), RunFolder(folder / f"own-{ranks.rank}")
    assert writes_to(shared, node) == ranks.first
    assert writes_to(options, node)
    assert ranks.all_reduce_max(0) == 0
    assert not [*shared.checkpoints.iterdir(), *options.checkpoints.iterdir()]


if __name__ == "__main__":
    config = Config(
        epochs=2, lr=0.05, warmup_epochs=0.5, weight_decay=0.01, clip_grad=0.5, ema_decay=0.9,
        grad_accum_steps=2, tensorboard=False, device="cpu", log_every_steps=2,
    )  # fmt: skip
    prove(
        config,
        ranks_agree,
        norms_share_their_mean_and_get_their_own_back,
        nodes_that_share_a_disk_write_once,
        no_rank_steps_before_all_have_read,
        no_step_waits_for_requests,
        gradients_lie_in_the_buckets_that_travel,
        two_ranks_train_like_one,
        a_signal_to_one_rank_stops_both_at_one_step,
    )
