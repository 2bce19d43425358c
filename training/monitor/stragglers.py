"""Stragglers: which rank the others wait for, and why: data, compute, or the network.

A step of a rank is, in this order:

    data       from the end of the last step until the batch is on the device
    compute    forward and backward, until the last of its own gradients is there
    exchange   until the gradients of all ranks are there
    the rest   update and reports; not looked at

Gradients are complete for all ranks at the same moment. So the rank with the shortest exchange is
the one that came last; what even that one spends there is the network's, and what the others spend
beyond it is waiting for that rank. It is late by data or by compute, whichever took it longer than
the others.

Gradients being complete everywhere at once, step times do not show whose link is slow:
training.deep_check does.

A step costs four readings of a clock: on a GPU, events in its own stream, which no host code waits
for until the line of the log. After the first few steps and then every few hundred the ranks
exchange what they saw: 24 bytes a step. The first step of a run, in which torch sets itself up, is
left out.
"""

import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rackrun.training.ranks import Ranks
from rackrun.units import plural

Item = TypeVar("Item")
Times = npt.NDArray[np.float64]
Mark = float | torch.cuda.Event

PARTS = ("data", "compute", "exchange")
MARKS = len(PARTS) + 1
FIRST_STEPS, EVERY_STEPS = 20, 200  # until the first look, and between later ones
UNREAD_STEPS = 8  # that a GPU may be behind
WORTH_WAITING, WORTH_NETWORK = 0.05, 0.2  # shares of a step worth a line
WORTH_FIRST = 0.25  # of waiting, at the first look: so few steps are uneven anywhere


@dataclass(frozen=True)
class Waiting:
    """Waiting times over some steps, in seconds per step."""

    steps: int
    step: float  # data, compute and exchange, on average over the ranks
    rank: int  # who is waited for the longest
    why: str  # data or compute
    waited: float  # by each of the others, on average
    rank_seconds: float  # what the rank's data or compute takes
    others_seconds: float  # the median of the others' there
    network: float
    host: str = ""  # of that rank
    remedy: str = ""  # what is done, or could be done, about a rank that is late by its compute

    @property
    def late(self) -> bool:
        """Return True when the wait for the rank is worth reporting."""
        worth = WORTH_WAITING if self.steps > FIRST_STEPS else WORTH_FIRST
        return self.waited >= worth * self.step

    @property
    def networked(self) -> bool:
        """Return True when the wait for the network is worth reporting."""
        return self.network >= WORTH_NETWORK * self.step

    @property
    def blamed(self) -> tuple[int, str]:
        """Return the rank that delays the others most, and by which part; -1 if none does."""
        if self.late:
            return self.rank, self.why
        return -1, "network" if self.networked else ""

    def text(self) -> str:
        """Return the report in words; empty when there is none."""
        remarks = []
        if self.late:
            remarks.append(
                f"the others wait for rank {self.rank}{self.host and f' on {self.host}'}"
                f" {_share(self.waited, self.step)}:"
                f" its {self.why} takes {self.rank_seconds * 1e3:.1f} ms,"
                f" theirs {self.others_seconds * 1e3:.1f} ms"
                f"{self.remedy and f' ({self.remedy})'}"
            )
        if self.networked:
            remarks.append(
                f"network-bound: {self.network / self.step:.0%} of each step"
                f" ({_share(self.network, self.step)}) is spent waiting for gradients"
            )
        return f"last {plural(self.steps, 'step')}: {'; '.join(remarks)}" if remarks else ""


def _share(part: float, step: float) -> str:
    return f"{part * 1e3:.1f} of {step * 1e3:.1f} ms a step"


class StragglerMonitor:
    """Watches the steps of this rank, and now and then compares them with the others'."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        ranks: Ranks,
        times_each_step: bool = False,
    ) -> None:
        """Watch from here on; `times_each_step`: also for --balance auto."""
        self._is_timing = ranks.world > 1
        self._newest = deque[list[Mark]](maxlen=UNREAD_STEPS if times_each_step else 0)
        self._ranks = ranks
        self._marks: list[Mark] = []  # of the current step
        self._steps: list[list[Mark]] = []
        self._beginning = True
        self._hooks: tuple[RemovableHandle, ...] = ()
        if self._is_timing:
            first = next(weight for weight in model.parameters() if weight.requires_grad)
            self._hooks = (
                first.register_post_accumulate_grad_hook(self._computed),  # type: ignore[no-untyped-call]
                optimizer.register_step_pre_hook(self._exchanged),
            )

    def close(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()

    def watched(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Return the same batches; the work on each is timed until the next one is asked for."""
        return self._timed(batches) if self._is_timing else iter(batches)

    def _timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        remaining = iter(batches)
        while True:
            self._marks = [self._now()]
            for batch in remaining:
                self._marks.append(self._now())
                self._steps.append(self._marks)  # complete once the optimiser begins
                self._newest.append(self._marks)
                yield batch
                break
            else:
                return

    def recent_compute_nanoseconds(self) -> int:
        """Return what forward and backward took in the steps that have ended since the last call.

        The mean; 0 if none has, as where a GPU is behind.
        """
        seconds = []
        while len(self._newest) > 1 and _is_over(self._newest[0]):
            if len(marks := self._newest.popleft()) == MARKS:  # it had a part in the step
                seconds.append(_between(*marks[1:3]))
        return max(1, round(sum(seconds) / len(seconds) * 1e9)) if seconds else 0

    def take(self) -> Waiting | None:
        """Return who waited for whom, after enough steps; a collective on all ranks."""
        if len(self._steps) < (FIRST_STEPS if self._beginning else EVERY_STEPS):
            return None
        steps, self._steps = self._steps, []
        if self._beginning:
            del steps[0]
            self._beginning = False
        rank_times = np.rint(np.array([self._times(marks) for marks in steps]) * 1e9)
        times_by_rank = self._ranks.all_gather(rank_times.astype(np.int64).ravel())
        times = np.stack(times_by_rank).reshape(self._ranks.world, len(steps), len(PARTS)) / 1e9
        whole = (times >= 0).all(axis=(0, 2))
        if not whole.any():
            return None
        waiting = straggler_in(times[:, whole])
        return replace(waiting, host=self._hosts[waiting.rank])

    @cached_property
    def _hosts(self) -> list[str]:
        name = np.frombuffer(socket.gethostname().encode(), np.uint8)
        return [host_name.tobytes().decode() for host_name in self._ranks.all_gather(name)]

    def _computed(self, weight: torch.Tensor) -> None:
        # The first weight's gradient is the last one. Of a batch in several parts, the last counts.
        del self._marks[2:]
        self._marks.append(self._now())

    def _exchanged(self, optimizer: Optimizer, *arguments: object) -> None:
        self._marks.append(self._now())

    def _now(self) -> Mark:
        if self._ranks.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _times(self, marks: list[Mark]) -> list[float]:
        if len(marks) != MARKS:  # this rank had no part in the step
            return [-1.0] * len(PARTS)
        return [_between(*pair) for pair in zip(marks, marks[1:], strict=False)]


def _is_over(marks: list[Mark]) -> bool:
    # A GPU may be behind the host: reading the times of a step that it has not done would wait.
    return isinstance(marks[-1], float) or marks[-1].query()  # type: ignore[no-untyped-call]


def _between(first: Mark, last: Mark) -> float:
    if isinstance(first, float) or isinstance(last, float):
        return float(last) - float(first)  # type: ignore[arg-type]
    last.synchronize()
    seconds: float = first.elapsed_time(last) / 1e3
    return max(seconds, 0.0)


def straggler_in(times: Times) -> Waiting:
    """Find the straggler from the times of all ranks: (ranks, steps, parts), in seconds."""
    ranks, steps, _ = times.shape
    exchange = times[:, :, 2]
    network = exchange.min(axis=0)
    late = exchange.argmin(axis=0)  # by step, who came last
    waits = (exchange - network).sum(axis=0) / (ranks - 1)  # by step, of each other rank
    caused = np.bincount(late, weights=waits, minlength=ranks)
    rank = int(caused.argmax())
    others = np.median(np.delete(times[:, :, :2], rank, axis=0), axis=0)  # (steps, 2)
    excess = (times[rank, :, :2] - others)[late == rank].sum(axis=0)
    part = int(excess.argmax())
    return Waiting(
        steps=steps,
        step=float(times.sum(axis=2).mean()),
        rank=rank,
        why=PARTS[part],
        waited=float(caused[rank] / steps),
        rank_seconds=float(times[rank, :, part].mean()),
        others_seconds=float(others[:, part].mean()),
        network=float(network.mean()),
    )
