"""Where the time of a step goes: what a run with --synthetic says at its end.

Three kinds of steps are timed one after the other: forward only, forward and backward without an
exchange, and with it. Their differences are the times of backward and of what the exchange adds,
which is less than the exchange itself takes, as it hides behind backward. Every rank takes part;
the slowest one's times count.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from training.compute import Compute
from training.distributed import Ranks, without_exchange
from training.pictures import Batch
from training.preparation import Preparation
from training.state import State

WARM_UP, TIMED = 3, 10  # steps of each kind
PEAK_FLOPS = {  # of a GPU in bfloat16 or float16 without sparsity, as its maker says
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "V100": 125e12,
    "A10": 125e12,
    "T4": 65e12,
}


@dataclass(frozen=True)
class Speed:
    """Seconds that the parts of a step take, and what a step is."""

    data: float
    forward: float
    backward: float
    exchange: float
    update: float
    images: int  # per rank and step
    ranks: int
    image_flops: float  # forward and backward
    peak_flops: float  # 0: not known

    @property
    def step(self) -> float:
        """Seconds of a whole step."""
        return self.data + self.forward + self.backward + self.exchange + self.update

    @property
    def rank_rate(self) -> float:
        """Pictures a second on each rank."""
        return self.images / self.step

    @property
    def efficiency(self) -> float:
        """Speed of a rank against a process that exchanges nothing."""
        return 1 - self.exchange / self.step

    def table(self) -> str:
        """All of it in words, a line each."""
        parts = {
            "data": self.data,
            "forward": self.forward,
            "backward": self.backward,
            "exchange (beyond backward)": self.exchange,
            "update": self.update,
        }
        lines = [f"a step of {self.images} pictures on each of {self.ranks} ranks:"]
        lines += [
            f"  {name:27}{seconds * 1e3:10.2f} ms {seconds / self.step:7.1%}"
            for name, seconds in parts.items()
        ]
        flops = self.rank_rate * self.image_flops
        share = f", {flops / self.peak_flops:.1%} of the GPU's peak" if self.peak_flops else ""
        return "\n".join(
            [
                *lines,
                f"images/s: {self.rank_rate:,.1f} per rank, {self.rank_rate * self.ranks:,.1f} "
                f"in all; efficiency against one process {self.efficiency:.1%}",
                f"arithmetic: {self.image_flops / 1e9:.2f} GFLOP per picture, "
                f"{flops / 1e12:.3f} TFLOP/s per rank{share}",
            ]
        )


def measure(
    state: State,
    model: nn.Module,
    preparation: Preparation,
    compute: Compute,
    ranks: Ranks,
    batches: Iterator[Batch],
) -> Speed:
    """Time the parts of a step; `model` is the one that exchanges. The weights change."""
    batch = next(batches)

    def forward() -> torch.Tensor:
        return cross_entropy(compute.answers(model, preparation, batch.images), batch.labels)

    def backward(exchanging: bool) -> None:
        with nullcontext() if exchanging else without_exchange(model):
            torch.autograd.backward(forward())

    def timed(act: Callable[[], object]) -> float:
        return slowest(ranks, act)

    data = timed(lambda: next(batches))
    ahead = timed(forward)
    alone = timed(lambda: backward(exchanging=False))
    together = timed(lambda: backward(exchanging=True)) if ranks.world > 1 else alone
    return Speed(
        data=data,
        forward=ahead,
        backward=max(alone - ahead, 0.0),
        exchange=max(together - alone, 0.0),
        update=timed(state.optimizer.step),
        images=len(batch.labels),
        ranks=ranks.world,
        image_flops=3 * forward_flops(state.model, preparation, compute, batch),
        peak_flops=peak_flops(ranks.device) if compute.autocast else 0.0,
    )


def slowest(ranks: Ranks, act: Callable[[], object]) -> float:
    """Seconds that `act` takes on the slowest rank, the mean of several times."""
    for number in range(WARM_UP + TIMED):
        if number == WARM_UP:
            _settle(ranks)
            begin = time.perf_counter()
        act()
    _settle(ranks)
    nanoseconds = round((time.perf_counter() - begin) / TIMED * 1e9)
    return ranks.strongest(nanoseconds) / 1e9


def _settle(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)


@torch.no_grad()
def forward_flops(
    model: nn.Module, preparation: Preparation, compute: Compute, batch: Batch
) -> float:
    """Operations of one picture's way through the model, a multiplication and an addition each."""
    with FlopCounterMode(display=False) as counter:
        compute.answers(model.eval(), preparation, batch.images[:1])
    model.train()
    return float(counter.get_total_flops())


def peak_flops(device: torch.device) -> float:
    """What the GPU could do at best per second; 0 where that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name.split()), 0.0)
