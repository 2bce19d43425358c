"""The time of a step by its parts, which a run with --synthetic prints at its end.

Three kinds of steps are timed one after the other: forward only, forward and backward without an
exchange, and with it. Their differences are the times of backward and of what the exchange adds,
which is less than the exchange itself takes, as it overlaps with backward; it is timed alone, too.
Every rank takes part; the slowest one's times count. All of it happens in several windows, which
show by how much such times differ.

Memory traffic is what an image moves if every operation reads all its inputs and writes all its
outputs, as it is without --compile, but for what stays in the GPU's caches.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from rackrun.tables import table
from rackrun.units import plural
from training.data.samples import Batch
from training.data.transforms import Transforms
from training.device import Compute
from training.ranks import Ranks, without_exchange
from training.state import TrainingState
from training.sync.gradient_sync import GradientSync

WINDOWS = 3
WARM_UP, TIMED = 2, 4  # steps of each kind in each window


class Peak(NamedTuple):
    """Peak performance of a device by its data sheet; 0: unknown."""

    flops: float = 0.0  # per second, in bfloat16 or float16, without sparsity
    memory_bytes: float = 0.0  # per second


PEAKS = {  # by words of the GPU's name; the first entry that fits counts
    "H200": Peak(989e12, 4.8e12),
    "H100 PCIe": Peak(756e12, 2.0e12),
    "H100": Peak(989e12, 3.35e12),
    "A100 80GB": Peak(312e12, 2.04e12),
    "A100": Peak(312e12, 1.56e12),
    "L40S": Peak(362e12, 0.86e12),
    "V100": Peak(125e12, 0.9e12),
    "A10": Peak(125e12, 0.6e12),
    "T4": Peak(65e12, 0.32e12),
}


@dataclass(frozen=True)
class Window:
    """Seconds that the parts of a step take, the mean of a few steps in a row."""

    data: float
    forward: float
    local: float  # forward and backward without an exchange
    together: float  # forward and backward with it
    update: float
    sending: float = 0.0  # what the exchange takes alone; 0: no plain sum of all ranks

    @property
    def backward(self) -> float:
        """Seconds of backward alone."""
        return max(self.local - self.forward, 0.0)

    @property
    def exchange(self) -> float:
        """Seconds that the exchange adds to a step."""
        return max(self.together - self.local, 0.0)

    @property
    def step(self) -> float:
        """Seconds of a whole step."""
        return self.data + self.forward + self.backward + self.exchange + self.update


@dataclass(frozen=True)
class StepProfile:
    """The times of a step's parts in each window, and what a step is."""

    windows: tuple[Window, ...]
    images: int  # per rank and step
    ranks: int
    image_flops: float  # forward and backward
    image_bytes: float  # of memory traffic, forward and backward; 0: not known
    peak: Peak
    sent_bytes: int = 0  # of gradients per step, once; 0: no plain sum of all ranks

    @property
    def typical(self) -> Window:
        """The window with the median step."""
        return sorted(self.windows, key=lambda window: window.step)[len(self.windows) // 2]

    @property
    def rank_rate(self) -> float:
        """Images per second on each rank."""
        return self.images / self.typical.step

    @property
    def efficiency(self) -> float:
        """Speed of a rank against a process that exchanges nothing."""
        return 1 - self.typical.exchange / self.typical.step

    def table(self) -> str:
        """Return the lines that a run with --synthetic prints."""
        typical = self.typical
        parts = {
            "data": typical.data,
            "forward": typical.forward,
            "backward": typical.backward,
            "exchange (beyond backward)": typical.exchange,
            "update": typical.update,
        }
        steps = [window.step * 1e3 for window in self.windows]
        head = ("part", "ms", "of the step")
        rows = [
            (name, f"{seconds * 1e3:.2f}", f"{seconds / typical.step:.1%}")
            for name, seconds in parts.items()
        ]
        return "\n".join(
            [
                f"a step of {plural(self.images, 'image')} on each of {plural(self.ranks, 'rank')},"
                f" {min(steps):.2f} to {max(steps):.2f} ms in {plural(len(steps), 'window')}:",
                table(head, rows, numbers=head[1:]),
                f"images/s: {self.rank_rate:,.1f} per rank, {self.rank_rate * self.ranks:,.1f} "
                f"in all; efficiency against one process {self.efficiency:.1%}",
                *self._network(),
                self._arithmetic(),
                self._memory(),
            ]
        )

    def report(self) -> dict[str, Any]:
        """Return the report for the launcher: bytes, images per second, seconds by window."""
        parts = [asdict(window) | {"steps": window.step} for window in self.windows]
        return {
            **{name: [part[name] for part in parts] for name in parts[0]},
            **{field.name: getattr(self, field.name) for field in fields(self)[1:]},
            "rank_rate": self.rank_rate,
        }

    def _network(self) -> list[str]:
        sending = self.typical.sending
        if not sending:
            return []
        bits = 8 * self.sent_bytes * 2 * (self.ranks - 1) / self.ranks / sending
        return [
            f"network: {self.sent_bytes / 1e6:.1f} MB of gradients take {sending * 1e3:.2f} ms"
            f" alone, {bits / 1e9:.2f} Gbit/s each way"
        ]

    def _arithmetic(self) -> str:
        flops = self.rank_rate * self.image_flops
        share = f"{flops / self.peak.flops:.1%} of the GPU's peak" if self.peak.flops else ""
        return (
            f"arithmetic: {self.image_flops / 1e9:.2f} GFLOP per image, "
            f"{flops / 1e12:.3f} TFLOP/s per rank, {share or 'peak of this device not known'}"
        )

    def _memory(self) -> str:
        if not self.image_bytes:
            return "memory: the traffic of a compiled model is not known"
        traffic = self.rank_rate * self.image_bytes
        peak = self.peak.memory_bytes
        share = f"{traffic / peak:.1%} of the GPU's bandwidth" if peak else ""
        return (
            f"memory: {self.image_bytes / 1e6:,.0f} MB per image, {traffic / 1e12:.3f} TB/s"
            f" per rank, {share or 'bandwidth of this device not known'}"
        )


def measure(
    state: TrainingState,
    sync: GradientSync,
    transforms: Transforms,
    compute: Compute,
    ranks: Ranks,
    batches: Iterator[Batch],
    averages_every: int = 0,
) -> StepProfile:
    """Time the parts of a step on all ranks together. The weights change.

    `averages_every`: steps under local SGD, in place of an exchange of gradients.
    """
    model, sent = sync.model, sync.gradient_buffer
    batch = next(batches)

    def forward() -> torch.Tensor:
        return cross_entropy(
            compute.logits(model, transforms.normalised, batch.images), batch.labels
        )

    def backward(exchanging: bool) -> None:
        with nullcontext() if exchanging else without_exchange(model):
            torch.autograd.backward(forward())

    timed = partial(slowest, ranks)

    def together(local: float) -> float:
        if averages_every:
            return local + timed(sync.average_now) / averages_every
        return timed(lambda: backward(exchanging=True)) if ranks.world > 1 else local

    def window() -> Window:
        local = timed(lambda: backward(exchanging=False))
        return Window(
            data=timed(lambda: next(batches)),
            forward=timed(forward),
            local=local,
            together=together(local),
            update=timed(state.optimizer.step),
            sending=0.0 if sent is None else timed(lambda: dist.all_reduce(sent)),
        )

    return StepProfile(
        windows=tuple(window() for _ in range(WINDOWS)),
        images=len(batch.labels),
        ranks=ranks.world,
        image_flops=3 * forward_flops(state.model, transforms, compute, batch),
        image_bytes=memory_traffic(state.model, transforms, compute, batch),
        peak=peak(ranks.device) if compute.autocast_dtype else Peak(),
        sent_bytes=0 if sent is None else sent.nbytes,
    )


def slowest(ranks: Ranks, act: Callable[[], object]) -> float:
    """Return the seconds that `act` takes on the slowest rank, the mean of several times."""
    for number in range(WARM_UP + TIMED):
        if number == WARM_UP:
            _settle(ranks)
            begin = time.perf_counter()
        act()
    _settle(ranks)
    nanoseconds = round((time.perf_counter() - begin) / TIMED * 1e9)
    return ranks.all_reduce_max(nanoseconds) / 1e9


def _settle(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)


@torch.no_grad()
def forward_flops(
    model: nn.Module, transforms: Transforms, compute: Compute, batch: Batch
) -> float:
    """Return the operations of one forward pass per image (a multiply-add is two)."""
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        compute.logits(model.eval(), transforms.normalised, batch.images[:1])
    model.train()
    return float(counter.get_total_flops())


def memory_traffic(
    model: nn.Module, transforms: Transforms, compute: Compute, batch: Batch
) -> float:
    """Return the bytes that one forward and backward pass moves per image; 0 where unknown."""
    if compute.compile:
        return 0.0
    traffic = MemoryTraffic()
    with traffic:
        loss = cross_entropy(
            compute.logits(model, transforms.normalised, batch.images), batch.labels
        )
        torch.autograd.backward(loss)
    return traffic.moved / len(batch.labels)


class MemoryTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of what operations read and write; a view does neither."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Do what is to be done, and count it."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            touched = tree_leaves((args, kwargs, result))
            self.moved += sum(
                tensor.nbytes for tensor in touched if isinstance(tensor, torch.Tensor)
            )
        return result


def peak(device: torch.device) -> Peak:
    """Return the peak performance of the GPU, per second."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return peak_of(name)


def peak_of(name: str) -> Peak:
    """Return the peak performance of a device of this name."""
    name_parts = set(re.split(r"[\s-]+", name))
    return next(
        (peak for which, peak in PEAKS.items() if name_parts.issuperset(which.split())), Peak()
    )
