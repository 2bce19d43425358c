"""Stragglers: which rank the others wait for, and why: data, compute, or the network.

Gradients are complete for all ranks at the same moment. So the rank with the shortest exchange is
the one that came last; what even that one spends there is the network's, and what the others spend
beyond it is waiting for that rank. It is late by data or by compute, whichever took it longer than
the others. Step times do not show whose link is slow: training.deep_check does.
"""

import socket
from dataclasses import dataclass, replace

import numpy as np

from rackrun.training.ranks import Ranks
from rackrun.training.step_times import FIRST_STEPS, PARTS, Times
from rackrun.units import plural

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


def waiting_in(times: Times, ranks: Ranks) -> Waiting | None:
    """Return who waited for whom, from the times of all ranks; a collective on all of them."""
    whole = (times >= 0).all(axis=(0, 2))
    if not whole.any():
        return None
    hosts = ranks.gather(socket.gethostname().encode())
    found = straggler_in(times[:, whole])
    return replace(found, host=hosts[found.rank].decode())


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
