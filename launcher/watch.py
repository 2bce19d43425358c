"""Who hangs: ranks that reported progress and then none, and processes that somebody stopped.

A rank is judged only once it has reported, so a command that never does can never be said to hang.
Ranks wait for each other, so the longest patience among them counts for all: while one saves, the
others may stand still. The one to name is the one that is furthest behind.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from launcher.job import Limits
from launcher.state import Rank, Run

PHASE_PATIENCE = {"start": 10.0, "train": 1.0, "evaluate": 5.0, "save": 15.0, "done": 5.0}
PHASE_PATIENCE["measure"] = 15.0  # a few dozen steps without a word
"""How many hang limits a rank may spend in a phase without getting further."""

PAIRS_SHOWN = 3

STEPS_PATIENCE = 10
"""How many median steps a single step may take, when that is longer than the limit."""


@dataclass(frozen=True)
class Hang:
    """Somebody who does not move."""

    node: int | None
    rank: int | None
    text: str


def find_hang(run: Run, limits: Limits, now: float, others: float = 0.0) -> Hang | None:
    """The rank or process that holds up the run, if one does for longer than is right.

    `others`: the patience, in seconds, with ranks that other launchers look after.
    """
    for host in run.hosts:
        if host.frozen and now - host.frozen_since > limits.hang_seconds:
            names = " and ".join(host.frozen)
            age = now - host.frozen_since
            return Hang(host.plan.node, None, f"{names} stopped by a signal for {age:.0f} s")
    reporting = [rank for rank in run.running if rank.phase]
    if not reporting:
        return None
    patience = max(others, longest_patience(run, limits))
    stalled = [rank for rank in reporting if now - rank.moved_at > patience]
    return blame(stalled, now) if stalled else None


def longest_patience(run: Run, limits: Limits) -> float:
    """How long everybody may stand still: as long as the one who may do so the longest."""
    return max((patience_seconds(rank, limits) for rank in run.running if rank.phase), default=0.0)


def patience_seconds(rank: Rank, limits: Limits) -> float:
    """How long this rank may stand still in its phase."""
    patience = limits.hang_seconds * PHASE_PATIENCE.get(rank.phase, 1.0)
    if rank.step_seconds:
        patience = max(patience, STEPS_PATIENCE * statistics.median(rank.step_seconds))
    return patience


def split_network(hang: Hang, run: Run) -> Hang:
    """The same hang, blamed on the network where hosts that live do not reach each other."""
    names = {host.address: host.name for host in run.plan.hosts}
    pairs = {
        frozenset((host.plan.name, names[address]))
        for host in run.hosts
        if host.unreached
        for address in host.unreached.addresses
        if address in names
    }
    if not pairs:
        return hang
    shown = sorted(" and ".join(sorted(pair)) for pair in pairs)
    more = f" and {len(shown) - PAIRS_SHOWN} more pairs" if len(shown) > PAIRS_SHOWN else ""
    between = ", between ".join(shown[:PAIRS_SHOWN]) + more
    return Hang(None, None, f"no rank died, but the network is cut between {between}: {hang.text}")


def blame(stalled: list[Rank], now: float) -> Hang:
    """Name the rank that is behind the others; if all stand at the same step, say so."""
    last = min(stalled, key=lambda rank: (rank.step, rank.moved_at))
    doing = {"train": f"at step {last.step}", "save": "while saving"}.get(
        last.phase, f"in phase {last.phase}"
    )
    text = f"no progress for {now - last.moved_at:.0f} s {doing}"
    if len(stalled) > 1 and len({rank.step for rank in stalled}) == 1:
        text += (
            f", like all {len(stalled)} ranks that run: look at their stacks, and at the network"
        )
    return Hang(last.node, last.rank, text)
