"""Started by test_exact: exact epochs on several real ranks, a line per case that holds.

    exact_ranks.py FOLDER CASE…          several cases after one another
    exact_ranks.py FOLDER train OPTIONS  one run; OPTIONS is a JSON object

FOLDER has shard folders named by their samples; reference runs of one process are made by rank 0.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import cross_entropy

from rackrun.run_folder import RunFolder
from rackrun.training import checkpoint, loss, setup, world
from rackrun.training import state as states
from rackrun.training import train as loop
from rackrun.training.config import Config
from rackrun.training.data.open import open_data
from rackrun.training.data.transforms import Transforms
from rackrun.training.device import set_up
from rackrun.training.entry import enter
from rackrun.training.ranks import Ranks
from rackrun.training.run.resume import resumed
from rackrun.training.setup import TrainingRun
from rackrun.training.state import TrainingState
from rackrun.training.stop_requests import StopRequests
from rackrun.training.sync.gradient_sync import StateBroadcast
from rackrun.training.task import Task
from rackrun.training.train import train
from rackrun.training.world import joined
from tests.lab.oracles import NOTED, exact_epochs

SIZE = 8
FULL_PART = 16 / int(os.environ["WORLD_SIZE"])  # of a global batch
FOLDER = Path(sys.argv[1])
os.environ |= NOTED


class Double(nn.Module):
    """A small model that computes in float64, so that only true differences show."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4) if norm else nn.Identity(),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 6 * 6, 8),
            nn.Tanh(),
            nn.Linear(8, 2),
        ).double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(images.double())
        return outputs


class Narrow(nn.Module):
    """A model with a norm over pixels, and one with a single value of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)),
        ).double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(images.double())
        return outputs


class Single(Double):
    """The same model in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(images)
        return outputs


class Kept(TrainingState):
    """A state that the cases can look at after the run."""

    last: TrainingState

    def __init__(self, model: nn.Module, config: Config, float16: bool = False) -> None:
        super().__init__(model, config, float16)
        Kept.last = self


def transforms(config: Config, epoch: int) -> Transforms:
    return Transforms(SIZE, crop_area=0.5)


TASK = Task("double", lambda config, classes: Double(), transforms)
NARROW = Task("narrow", lambda config, classes: Narrow(), transforms)
SINGLE = Task("single", lambda config, classes: Single(), transforms)
NORMED = Task("normed", lambda config, classes: Double(norm=True), transforms)


def settings(samples: int, name: str, **options: Any) -> Config:
    values: dict[str, Any] = {
        "data": str(FOLDER / str(samples)), "run_folder": str(FOLDER / "runs" / name),
        "epochs": 2, "batch_size": 16, "global_batch": 16, "lr": 0.05, "momentum": 0.9,
        "clip_grad": 0.5, "ema_decay": 0.5, "weight_decay": 0.01, "workers": 0,
        "tensorboard": False, "device": "cpu", "exact_epochs": True,
        "precision": "fp32",
    }  # fmt: skip
    return Config(**{**values, **options})


def ran(config: Config, ranks: Ranks, task: Task = TASK) -> dict[str, Any]:
    """Run; return the state at the end."""
    with StopRequests(config.save_minutes) as stops:
        compute = set_up(config, ranks)
        earlier = resumed(config.resume, task.name, ranks) if config.resume else None
        if earlier:
            config = earlier.resolved(config)
        data = open_data(
            config, ranks, partial(task.transforms, config), task.name, task.synthetic_classes
        )
        assert train(TrainingRun(task, config, ranks, stops, compute, data, earlier)) == 0
    return Kept.last.state_dict()


def tensors(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a state with its path."""
    if isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from tensors(value, f"{name}.{key}")
    else:
        yield name, state


def digest(state: dict[str, Any]) -> bytes:
    total = hashlib.sha256()
    for name, value in tensors(state):
        content = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value)
        total.update(f"{name}={content!r}".encode())
    return total.digest()


def equal_on_all(ranks: Ranks, state: dict[str, Any]) -> bool:
    return len({bytes(d) for d in ranks.all_gather(np.frombuffer(digest(state), np.uint8))}) == 1


def far(result: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference of two states, relative to its tensor's largest number."""
    worst, others = 0.0, dict(tensors(expected))
    for name, value in tensors(result):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            scale = max(float(others[name].abs().max()), 1e-12)
            worst = max(worst, float((value - others[name]).abs().max()) / scale)
        elif name in (".step", ".epoch"):
            assert value == others[name], name
    return worst


def alone(ranks: Ranks) -> Ranks:
    return replace(ranks, rank=0, local_rank=0, world=1)


def compared(
    ranks: Ranks, samples: int, name: str, task: Task = TASK, **options: Any
) -> tuple[bool, float]:
    """Return whether all ranks end equal, and how far rank 0 is from one process."""
    state = ran(settings(samples, f"{name}-many", **options), ranks, task)
    equal = equal_on_all(ranks, state)
    distance = 0.0
    if ranks.first:
        whole = {**options, "grad_accum_steps": 1}
        distance = far(state, ran(settings(samples, f"{name}-one", **whole), alone(ranks), task))
    return equal, distance


def exact_everywhere(run: str) -> None:
    assert exact_epochs(FOLDER / "runs" / run)


def sizes(ranks: Ranks) -> tuple[int, ...]:
    """Return sizes of data sets with a last step of one sample, and of 4 or 13."""
    return (49, 52) if ranks.world == 3 else (49, 52, 61)


def like_one_process(ranks: Ranks) -> None:
    """Tails of one sample, of fewer than ranks, of more than ranks, and a data set of two."""
    for samples in (*sizes(ranks), 2):
        name = f"{ranks.world}-{samples}"
        equal, distance = compared(ranks, samples, name)
        assert equal and distance < 1e-9, (samples, equal, distance)
        if ranks.first:
            exact_everywhere(f"{name}-many")


def in_parts_like_one_process(ranks: Ranks) -> None:
    """Gradients all_gather over several parts, adamw, and more samples than fit at once."""
    for options in (
        {"grad_accum_steps": 2, "batch_size": 4},
        {"batch_size": 2},
        {"optimizer": "adamw", "lr": 0.01},
    ):
        equal, distance = compared(ranks, 49, f"parts-{ranks.world}-{len(options)}", **options)
        assert equal and distance < 1e-7, (options, equal, distance)


def damaged_images_leave_no_rank_waiting(ranks: Ranks) -> None:
    """A rank whose only image of a step is damaged takes part all the same; so does the one that
    alone has an image in the last step."""
    options = {"data": str(FOLDER / "broken"), "global_batch": 3, "bad_samples": "quarantine"}
    equal, distance = compared(ranks, 49, "damaged", **options)
    assert equal and distance < 1e-9, (equal, distance)


def batch_norms_and_autocast_end_equal(ranks: Ranks) -> None:
    """Statistics, and sums in bfloat16, differ from one process's, but not from rank to rank."""
    for samples in sizes(ranks):
        state = ran(settings(samples, f"norm-{samples}"), ranks, NORMED)
        assert equal_on_all(ranks, state)
        assert all(value.isfinite().all() for _, value in tensors(state["model"]))
    for name, options in (
        ("autocast", {"precision": "bf16"}),
        ("short", {"grad_compression": "bfloat16"}),
    ):
        assert equal_on_all(ranks, ran(settings(49, name, **options), ranks, NORMED))


def float16_skips_the_same_steps(ranks: Ranks) -> None:
    """Gradients that overflow on one rank are skipped by all, also in a tail with few ranks; a run
    that goes on in between ends with the same bits, the scale of its loss among them."""
    scaler = partial(GradScaler, growth_interval=1)  # grows until it overflows, and again
    options = {"precision": "fp16", "epochs": 3, "save_steps": 5, "log_every_steps": 1}
    options["keep_checkpoints"] = 9
    with patch.object(states, "GradScaler", scaler):
        straight = ran(settings(49, "half", **options), ranks, SINGLE)
        assert equal_on_all(ranks, straight)
        name = RunFolder(FOLDER / "runs" / "half")
        again = settings(49, "half-again", **options, resume=str(name.checkpoint(5)))
        assert digest(ran(again, ranks, SINGLE)) == digest(straight)
    lines = [json.loads(line) for line in name.metrics.read_text().splitlines()]
    skipped = [line["skipped_steps"] for line in lines if line["kind"] == "train"]
    assert len(skipped) == 12 and 1 < sum(skipped) < 8, skipped


def each_rank_keeps_its_statistics(ranks: Ranks) -> None:
    """Under the DDP of this torch, and in the way that an older one, as 2.10, needs."""
    older = SimpleNamespace(parameters={"broadcast_buffers": None})
    for of_ddp in (signature, lambda kind: older):
        model = Double(norm=True)
        means = [norm.running_mean for norm in model.modules() if isinstance(norm, nn.BatchNorm2d)]
        for mean in means:
            mean.fill_(ranks.rank)
        with patch("rackrun.training.ranks.signature", of_ddp):
            ranks.ddp(model)
        assert means and all(mean.eq(ranks.rank).all() for mean in means)


def norms_go_on_as_if_never_saved(ranks: Ranks) -> None:
    """Where a rank has a single image in some steps, or the last one has fewer than ranks: a run
    that saved on its way, and one that went on from there, end like one that did not. So do ranks
    whose statistics differ until the epoch ends.
    """
    for samples, batch in ((52, 25), (61, 29), (52, 13)):  # the last step has 2, 3 or 13 samples
        options: dict[str, Any] = {"save_minutes": 0, "global_batch": batch}
        name = f"resumed-{ranks.world}-{batch}"
        whole = ran(settings(samples, name, **options), ranks, NARROW)
        saving = {**options, "save_steps": 2, "keep_checkpoints": 99}
        saved = ran(settings(samples, f"{name}-saved", **saving), ranks, NARROW)
        point = str(RunFolder(FOLDER / "runs" / f"{name}-saved").checkpoint(2))
        resumed = ran(settings(samples, f"{name}-again", resume=point, **options), ranks, NARROW)
        if ranks.first:
            statistics = checkpoint.read(Path(point))["statistics"]
            assert batch != 13 or len(statistics.unique(dim=0)) == ranks.world
            assert digest(saved["model"]) == digest(whole["model"]), samples
            distance = far({"model": resumed["model"]}, {"model": whole["model"]})
            # DDP regroups gradients after its first step: from 3 ranks on the last bit may differ.
            assert distance == 0 if ranks.world == 2 else distance < 1e-13, (samples, distance)


def a_compiled_model_ends_equal(ranks: Ranks) -> None:
    """torch.compile changes nothing about it."""
    equal, distance = compared(ranks, 49, "compiled", compile=True)
    assert equal and distance < 1e-9


@contextmanager
def mean_loss() -> Iterator[None]:
    """Put a known mistake in place: each rank takes the mean over its own samples."""

    def mean(logits: Any, labels: Any, reduction: str, label_smoothing: float) -> torch.Tensor:
        return cross_entropy(logits, labels, label_smoothing=label_smoothing) * FULL_PART

    with patch.object(loss, "cross_entropy", mean):
        yield


def wrong_ways_are_seen(ranks: Ranks) -> None:
    """The comparisons above fail for what is known to be silently wrong."""
    with mean_loss():
        state = ran(settings(49, "mean"), ranks)
    if ranks.first:
        assert far(state, ran(settings(49, "sum"), alone(ranks))) > 1e-3

    def step_only(broadcast: StateBroadcast, is_last_joiner: bool) -> None:
        """Hand over the step count only, beside the parameters, which torch's Join does."""
        broadcast._state.step = ranks.all_reduce_max(broadcast._state.step)

    with patch.object(StateBroadcast, "post_hook", step_only):
        assert not equal_on_all(ranks, ran(settings(49, "forked"), ranks))


def a_stray_collective_does_not_pass(ranks: Ranks) -> None:
    """A model that exchanges something of its own in the tail makes the run fail, not pass."""

    class Stray(Double):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(images)
            dist.all_reduce(outputs.detach().sum(0))
            return outputs

    ran(settings(49, "stray"), ranks, Task("stray", lambda config, classes: Stray(), transforms))


def an_error_in_the_tail(ranks: Ranks) -> None:
    """The rank that has the last sample fails in its last step."""

    class Failing(Double):
        calls = 0

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.training and self.calls == 4 and len(images):
                raise ValueError("failed in the tail")
            return super().forward(images)

    ran(settings(49, "error"), ranks, Task("fails", lambda config, classes: Failing(), transforms))


CASES: tuple[Callable[[Ranks], None], ...] = (
    like_one_process,
    in_parts_like_one_process,
    damaged_images_leave_no_rank_waiting,
    batch_norms_and_autocast_end_equal,
    each_rank_keeps_its_statistics,
    norms_go_on_as_if_never_saved,
    float16_skips_the_same_steps,
    a_compiled_model_ends_equal,
    wrong_ways_are_seen,
    a_stray_collective_does_not_pass,
    an_error_in_the_tail,
)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    timeout = 20 if "a_stray_collective_does_not_pass" in names else 300
    with (
        patch.object(setup, "TrainingState", Kept),
        patch.object(world, "COLLECTIVE_TIMEOUT", timedelta(seconds=timeout)),
        joined(Config(device="cpu")) as ranks,
    ):
        for case in CASES:
            if case.__name__ in names:
                case(ranks)
                if ranks.first:
                    sys.stdout.write(f"holds: {case.__name__}\n")
                    sys.stdout.flush()
    os._exit(0)


def train_once(options: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    return loop.run(TASK, settings(**options))


if __name__ == "__main__":
    if sys.argv[2] == "train":
        enter(lambda args: train_once(json.loads(args[2])))
    main(sys.argv[2:])
