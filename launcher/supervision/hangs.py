"""Hangs: ranks that stopped making progress, and processes that were stopped by a signal.

Only ranks that have reported can hang, so a command that never reports never counts as hung. Ranks
wait for each other, so the longest limit among them holds for all: while one saves, the others may
make no progress. All stop soon after the first one does. The culprit is the rank that was stopped,
or whose stack shows no collective (see `root_cause`), or that has the fewest steps.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from launcher.run.job import Limits
from launcher.run.state import HostState, RankState, RunState
from rackrun.contract import phases

PHASE_HANG_FACTORS = {
    phases.START: 10.0,
    phases.DOWNLOAD: 240.0,  # of weights; one that stalls fails after a minute
    phases.COMPILE: 15.0,  # torch.compile, at the first step and for larger images
    phases.TRAIN: 1.0,
    phases.DATA: 3.0,  # a reader gives up on its server after 120 s
    phases.EVALUATE: 5.0,
    phases.SAVE: 15.0,
    phases.MEASURE: 15.0,  # a few dozen steps without a report
    phases.DONE: 5.0,
}
"""The number of hang limits that a rank may spend in a phase without progress."""

_PAIRS_SHOWN = 3

_HANG_STEPS = 10
"""The number of median steps that one step may take, where that is longer than the limit."""


@dataclass(frozen=True)
class Suspect:
    """A rank without progress: the culprit, or one that only waits for it."""

    node: int
    rank: int
    step: int
    text: str


@dataclass(frozen=True)
class Hang:
    """A host or rank without progress."""

    node: int | None
    rank: int | None
    text: str
    suspects: tuple[Suspect, ...] = ()
    """The ranks among whom the stacks decide, the one with the fewest steps first."""


def find_hang(run: RunState, limits: Limits, now: float, others: float = 0.0) -> Hang | None:
    """Return the ranks or the process that have delayed the run for too long; None if none has.

    `others`: the limit, in seconds, of ranks that other launchers supervise.
    """
    reporting = [rank for rank in run.running if rank.phase]
    suspicious = any(now - rank.moved_at > limits.hang_seconds for rank in reporting)
    if not suspicious and not any(host.frozen for host in run.hosts):
        return None  # at once: with thousands of ranks the rest takes longer than a turn may
    limit = max(others, longest_hang_limit(run, limits))
    stalled = any(now - rank.moved_at > limit for rank in reporting)
    for host in run.hosts:
        if host.frozen and (stalled or now - host.frozen_since > limits.hang_seconds):
            return _stopped(host, run, now)
    if not stalled:
        return None
    return _standstill([rank for rank in reporting if now - rank.moved_at > limit / 2], now)


def _stopped(host: HostState, run: RunState, now: float) -> Hang:
    """Return the hang of a stopped process; for a rank that reports, since its last progress."""
    names = " and ".join(host.frozen)
    rank = next(
        (rank for rank in run.ranks_of(host.plan.node) if names == f"rank {rank.rank}"), None
    )
    if rank and rank.phase:
        return Hang(rank.node, rank.rank, f"stopped by a signal: {_stillness(rank, now)}")
    age = now - host.frozen_since
    return Hang(host.plan.node, None, f"{names} stopped by a signal for {age:.0f} s")


def _standstill(still: list[RankState], now: float) -> Hang:
    """Return the hang of ranks without progress: one is the cause, several are suspects."""
    fewest_first = sorted(still, key=lambda rank: (rank.step, rank.moved_at))
    suspects = tuple(
        Suspect(rank.node, rank.rank, rank.step, _stillness(rank, now)) for rank in fewest_first
    )
    if len(suspects) == 1:
        return Hang(suspects[0].node, suspects[0].rank, suspects[0].text, suspects)
    age = now - min(rank.moved_at for rank in still)
    return Hang(None, None, f"no progress of {len(still)} ranks for {age:.0f} s", suspects)


def _stillness(rank: RankState, now: float) -> str:
    """Describe for how long a rank has made no progress, and where it was last."""
    doing = {
        phases.TRAIN: f"at step {rank.step}",
        phases.DATA: f"waiting for data after step {rank.step}",
        phases.SAVE: "while saving",
    }.get(rank.phase, f"in phase {rank.phase}")
    return f"no progress for {now - rank.moved_at:.0f} s {doing}"


def find_absent(run: RunState, limits: Limits, now: float) -> Hang | None:
    """Return the host whose torchrun the others wait for, so that no ranks start.

    The time starts again whenever a torchrun joins.
    """
    age = now - run.gathering_at
    if age <= limits.rendezvous_seconds:
        return None
    late = [
        host for host in run.hosts if not all(rank.pid for rank in run.ranks_of(host.plan.node))
    ]
    if not late or any(host.opened_at is None for host in late):
        return None
    absent = [host.plan for host in late if not host.joined] or [host.plan for host in late]
    text = f"torchrun has not joined the others for {age:.0f} s"
    if len(absent) == 1 or not absent[0].node:  # the others join on the first host
        return Hang(absent[0].node, None, text)
    return Hang(None, None, f"{text} on {', '.join(host.name for host in absent)}")


def longest_hang_limit(run: RunState, limits: Limits) -> float:
    """Return how long ranks may make no progress: the longest limit of any of them."""
    return max((_hang_limit(rank, limits) for rank in run.running if rank.phase), default=0.0)


def _hang_limit(rank: RankState, limits: Limits) -> float:
    """Return how long this rank may make no progress in its phase."""
    limit = limits.hang_seconds * PHASE_HANG_FACTORS.get(rank.phase, 1.0)
    if rank.step_seconds:
        limit = max(limit, _HANG_STEPS * statistics.median(rank.step_seconds))
    return limit


def split_network(hang: Hang, run: RunState) -> Hang:
    """Return the hang, attributed to the network if live hosts cannot reach each other."""
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
    more = f" and {len(shown) - _PAIRS_SHOWN} more pairs" if len(shown) > _PAIRS_SHOWN else ""
    between = ", between ".join(shown[:_PAIRS_SHOWN]) + more
    return Hang(None, None, f"no rank died, but the network is cut between {between}: {hang.text}")
