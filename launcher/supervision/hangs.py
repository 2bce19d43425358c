"""Hangs: ranks that stopped making progress, and processes that were stopped by a signal.

Only ranks that report can hang: those of a task from their start on, those of a command from their
first report on. Where none ever reports, --silent-minutes limits the time without output. Ranks
wait for each other, so the longest limit among them holds for all: while one saves, the others may
make no progress. All stop soon after the first one does. The culprit is the rank that was stopped,
or whose stack shows no collective (see `root_cause`), or that has the fewest steps.

Before a step has shown how long steps take, a rank that computes is slow, not hung.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median

from rackrun.contract import phases
from rackrun.launcher.remote.agent.frames import USAGE_SECONDS
from rackrun.launcher.run.settings import Limits
from rackrun.launcher.run.state import HostState, RankState, RunState
from rackrun.launcher.supervision.agent_protocol import reach_order
from rackrun.launcher.supervision.agents import AgentGroup

PHASE_HANG_FACTORS = {
    phases.START: 10.0,
    phases.DOWNLOAD: 240.0,  # of weights; one that stalls fails after a minute
    phases.PREFETCH: 3.0,  # another shard, as in the phase "data"
    phases.COMPILE: 15.0,  # torch.compile, at the first step and for larger images
    phases.TRAIN: 1.0,
    phases.DATA: 3.0,  # a reader gives up on its server after 120 s
    phases.EVALUATE: 5.0,
    phases.SAVE: 15.0,
    phases.DONE: 5.0,
}
"""The number of hang limits that a rank may spend in a phase without progress."""

_PAIRS_SHOWN = 3
_STALL_SHARE = 1 / 3  # of the limit, after which a standstill is reported, but ends nothing yet
_REACH_SECONDS = 2.0  # for hosts to reach one another

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


class HangDetector:
    """Watches for ranks that do not start or make no progress."""

    def __init__(self, run: RunState, agents: AgentGroup, limits: Limits) -> None:
        self._run = run
        self._agents = agents
        self._limits = limits
        self._tested_at: float | None = None
        self._latest_limit = 0.0
        """For how long ranks may make no progress, as of the last turn; 0: all made some."""
        self._lenient_limit = 0.0
        """The limit that counts: when it has just become shorter, the old one and the new one."""
        self._fell_at = -math.inf

    def stall(self, now: float, others_limit: float) -> tuple[Hang, float] | None:
        """Return a standstill that may become a hang, and after how many seconds; None if none is.

        `others_limit`: the seconds that ranks of other launchers may go without progress.
        """
        run, limits = self._run, self._limits
        if not may_stall(run, _STALL_SHARE * limits.hang_seconds, now):
            self._latest_limit = 0.0
            return None
        self._update_limits(current_hang_limit(run, limits, now, others_limit), now)
        stall = find_hang(run, limits, now, self._lenient_limit, _STALL_SHARE)
        is_frozen = any(host.frozen for host in run.hosts)
        return (stall, limits.hang_seconds if is_frozen else self._lenient_limit) if stall else None

    def _update_limits(self, limit: float, now: float) -> None:
        # Ranks that wait for one that saves have its limit. When it has saved, they still have to
        # make their step: a shorter limit counts from now on, on top of the longer one.
        if limit < self._latest_limit:
            self._lenient_limit, self._fell_at = self._latest_limit + limit, now
        elif now - self._fell_at > limit:
            self._lenient_limit = limit
        self._latest_limit, self._lenient_limit = limit, max(limit, self._lenient_limit)

    def hang(self, now: float) -> Hang | None:
        """Return a hang, with its cause where that is the network; None while hosts test it.

        To be asked after `stall`.
        """
        run, limits = self._run, self._limits
        hang = (
            find_unjoined(run, limits, now)
            or find_hang(run, limits, now, self._lenient_limit)
            or find_silence(run, limits, now)
        )
        if hang is None:
            self._tested_at = None  # the next hang needs a new test
            return None
        # Ranks on both sides of a cut network hang as well: no rank is named before hosts have
        # reported which others they reach.
        if self._tested_at is None:
            self._tested_at = now
            self._order_test()
        is_tested = all(host.unreached or host.over for host in run.hosts)
        is_tested |= now - self._tested_at > 2 * _REACH_SECONDS
        return split_network(hang, run) if is_tested else None

    def _order_test(self) -> None:
        ports = [(host.plan.address, host.port) for host in self._run.hosts if host.port]
        for client, host in zip(self._agents.clients, self._run.hosts, strict=True):
            others = [port for port in ports if port[0] != host.plan.address]
            host.unreached = None
            client.send(reach_order(others, _REACH_SECONDS))


def find_hang(
    run: RunState, limits: Limits, now: float, least: float = 0.0, share: float = 1.0
) -> Hang | None:
    """Return the ranks or the process that have delayed the run for too long; None if none has.

    `least`: ranks may make no progress for this long in any case; with a smaller `share` of the
    limits it is a stall, which may still end well.
    """
    if not may_stall(run, share * limits.hang_seconds, now):
        return None  # at once: with thousands of ranks the rest takes longer than a turn may
    reporting = _reporting(run)
    limit = share * current_hang_limit(run, limits, now, least)
    stalled = any(now - rank.moved_at > limit for rank in reporting)
    for host in run.hosts:
        if host.frozen and (stalled or now - host.frozen_since > share * limits.hang_seconds):
            return _stopped(host, run, now)
    if not stalled:
        return None
    return _standstill([rank for rank in reporting if now - rank.moved_at > limit / 2], now)


def may_stall(run: RunState, seconds: float, now: float) -> bool:
    """Return whether a rank has made no progress for so long, or a process is stopped."""
    still = any(now - rank.moved_at > seconds for rank in _reporting(run))
    return still or any(host.frozen for host in run.hosts)


def find_unreporting(run: RunState, limits: Limits, now: float) -> list[int]:
    """Return the ranks whose hangs cannot be noticed: those that have not reported for a while.

    All of them are returned at once, when the one that started last has had its time: the line
    about them is shown only once, and has to name each.
    """
    silent = [] if run.plan.task else [rank for rank in run.running if not rank.phase]
    is_early = any(now - rank.moved_at <= limits.hang_seconds for rank in silent)
    return [] if is_early else [rank.rank for rank in silent]


def find_silence(run: RunState, limits: Limits, now: float) -> Hang | None:
    """Return all ranks, if none has ever reported nor printed anything for too long."""
    ranks = list(run.running)
    # Under `node`, each launcher sees the output of its own ranks, and mostly rank 0 alone prints.
    is_blind = bool(run.plan.hosts[0].node)
    if not limits.silent_minutes or not ranks or is_blind or any(_reporting(run)):
        return None
    age = now - max(run.printed_at, *(rank.moved_at for rank in ranks))
    if age <= 60 * limits.silent_minutes:
        return None
    text = f"no output for {age / 60:.3g} min{_busy(run)}"
    suspects = tuple(Suspect(rank.node, rank.rank, 0, text) for rank in ranks)
    return Hang(None, None, text, suspects)


def _busy(run: RunState) -> str:
    """Return how busy CPUs and GPUs are: a rank that spins in a collective looks at work."""
    usages = [host.usage for host in run.hosts if host.usage]
    shares: dict[str, list[float]] = {
        "CPUs": [100 * usage.cpu for usage in usages],
        "GPUs": [gpu.busy for usage in usages for gpu in usage.gpus],
    }
    return "".join(f", {what} {fmean(each):.0f} % busy" for what, each in shares.items() if each)


def _reporting(run: RunState) -> list[RankState]:
    # A task's ranks count before their first report; a command's may never send one.
    return [rank for rank in run.running if rank.phase or run.plan.task]


def _stopped(host: HostState, run: RunState, now: float) -> Hang:
    names = " and ".join(host.frozen)
    rank = next(
        (rank for rank in run.ranks_of(host.plan.node) if names == f"rank {rank.rank}"), None
    )
    if rank and rank.phase:
        return Hang(rank.node, rank.rank, f"stopped by a signal: {_stillness(rank, now)}")
    age = now - host.frozen_since
    return Hang(host.plan.node, None, f"{names} stopped by a signal for {age:.0f} s")


def _standstill(still: list[RankState], now: float) -> Hang:
    fewest_first = sorted(still, key=lambda rank: (rank.step, rank.moved_at))
    suspects = tuple(
        Suspect(rank.node, rank.rank, rank.step, _stillness(rank, now)) for rank in fewest_first
    )
    if len(suspects) == 1:
        return Hang(suspects[0].node, suspects[0].rank, suspects[0].text, suspects)
    age = now - min(rank.moved_at for rank in still)
    text = f"no progress of {len(still)} ranks for {age:.0f} s"
    if suspects[0].step < suspects[1].step:
        text += f", rank {suspects[0].rank} is the furthest behind, at step {suspects[0].step}"
    return Hang(None, None, text, suspects)


def _stillness(rank: RankState, now: float) -> str:
    doing = {
        "": "before its first report",
        phases.TRAIN: f"at step {rank.step}" if rank.step else "before its first step",
        phases.DATA: f"waiting for data after step {rank.step}",
        phases.SAVE: "while saving",
    }.get(rank.phase, f"in phase {rank.phase}")
    return f"no progress for {now - rank.moved_at:.0f} s {doing}"


def find_unjoined(run: RunState, limits: Limits, now: float) -> Hang | None:
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


def current_hang_limit(run: RunState, limits: Limits, now: float, least: float) -> float:
    """Return how long the ranks here may make no progress now: `least`, or longer."""
    limit = max(least, longest_hang_limit(run, limits, now))
    if run.plan.uses_gpus:
        still = [r for r in _reporting(run) if now - r.moved_at > limits.hang_seconds]
        if still and all(_computes(rank, limits, now) for rank in still):
            return max(limit, _computing_limit(limits))
    return limit


def longest_hang_limit(run: RunState, limits: Limits, now: float) -> float:
    """Return how long ranks may make no progress: the longest limit of any of them."""
    ranks = _reporting(run)
    # On CPUs, ranks that wait for a slow one sleep. On GPUs they compute as well, in a kernel of
    # NCCL that waits, so that there only all of them together show that none is stuck.
    if not run.plan.uses_gpus and any(_computes(rank, limits, now) for rank in ranks):
        return max(_computing_limit(limits), *(_hang_limit(rank, limits) for rank in ranks))
    return max((_hang_limit(rank, limits) for rank in ranks), default=0.0)


def _hang_limit(rank: RankState, limits: Limits) -> float:
    phase = rank.phase or phases.START
    limit = limits.hang_seconds * PHASE_HANG_FACTORS.get(phase, 1.0)
    if rank.step_seconds:
        limit = max(limit, _HANG_STEPS * median(rank.step_seconds))
    return limit


def _computes(rank: RankState, limits: Limits, now: float) -> bool:
    """Return whether a rank has computed within the limit, and no step has shown its pace yet."""
    reports_seconds = 2 * min(USAGE_SECONDS, limits.lease_seconds / 3)
    return now - rank.computed_at < limits.hang_seconds + reports_seconds


def _computing_limit(limits: Limits) -> float:
    # Until a step has shown how long steps take: as long as a compilation, and no longer.
    return limits.hang_seconds * PHASE_HANG_FACTORS[phases.COMPILE]


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
