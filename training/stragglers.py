"""Stragglers: which rank the others wait for, and why: data, compute, or the network.

Gradients are complete for all ranks at the same moment. So the rank with the shortest exchange is
the one that came last; what even that one spends there is the network's, and what the others spend
beyond it is waiting for that rank. It is late by data or by compute, whichever took it longer than
the others. Step times do not show whose link is slow: training.deep_check does.

After the first few steps and then every few hundred the ranks exchange what they saw: 24 bytes a
step. The first step of a run, in which torch sets itself up, is left out.
"""

import socket
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rackrun.training.ranks import Ranks
from rackrun.training.step_times import PARTS, StepTimes, Times
from rackrun.units import plural

FIRST_STEPS, EVERY_STEPS = 20, 200  # until the first look, and between later ones
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
    def is_late(self) -> bool:
        """Whether the wait for the rank is worth reporting."""
        worth = WORTH_WAITING if self.steps > FIRST_STEPS else WORTH_FIRST
        return self.waited >= worth * self.step

    @property
    def is_networked(self) -> bool:
        """Whether the wait for the network is worth reporting."""
        return self.network >= WORTH_NETWORK * self.step

    @property
    def blamed(self) -> tuple[int, str]:
        """The rank that delays the others most, and by which part; -1 if none does."""
        if self.is_late:
            return self.rank, self.why
        return -1, "network" if self.is_networked else ""

    def text(self) -> str:
        """Return the report in words; empty when there is none."""
        remarks = []
        if self.is_late:
            where = f" on {self.host}" if self.host else ""
            remedy = f" ({self.remedy})" if self.remedy else ""
            remarks.append(
                f"the others wait for rank {self.rank}{where} {_share(self.waited, self.step)}:"
                f" its {self.why} takes {self.rank_seconds * 1e3:.1f} ms,"
                f" theirs {self.others_seconds * 1e3:.1f} ms{remedy}"
            )
        if self.is_networked:
            remarks.append(
                f"network-bound: {self.network / self.step:.0%} of each step"
                f" ({_share(self.network, self.step)}) is spent waiting for gradients"
            )
        return f"last {plural(self.steps, 'step')}: {'; '.join(remarks)}" if remarks else ""


def _share(part: float, step: float) -> str:
    return f"{part * 1e3:.1f} of {step * 1e3:.1f} ms a step"


class Stragglers:
    """Compares, now and then, the steps of this rank with the others'."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._is_first_look = True

    def look(self, times: StepTimes) -> Times | None:
        """Return the times of all ranks after enough steps: (ranks, steps, parts), in seconds.

        It is a collective on all ranks. Times are -1 of a step in which a rank had no part.
        """
        if len(times) < (FIRST_STEPS if self._is_first_look else EVERY_STEPS):
            return None
        own = times.take()
        if self._is_first_look:
            own = own[1:]
            self._is_first_look = False
        every = np.frombuffer(b"".join(self._ranks.gather(own.tobytes())))
        return every.reshape(self._ranks.world, len(own), len(PARTS))

    def waiting(self, times: Times) -> Waiting | None:
        """Return who waited for whom; a collective on all ranks."""
        whole = (times >= 0).all(axis=(0, 2))
        if not whole.any():
            return None
        found = straggler_in(times[:, whole])
        return replace(found, host=self._hosts[found.rank])

    @cached_property
    def _hosts(self) -> list[str]:
        return [name.decode() for name in self._ranks.gather(socket.gethostname().encode())]


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
