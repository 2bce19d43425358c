"""The current state of every host and rank: events go in, nothing is decided."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rackrun.contract import phases
from rackrun.launcher.errors import HostLost
from rackrun.launcher.run.events import (
    Closed,
    Computing,
    Event,
    Frozen,
    Joined,
    Lost,
    Opened,
    Output,
    RankEnded,
    RankStarted,
    Report,
    Stopping,
    Swept,
    Unreached,
    Usage,
)
from rackrun.launcher.run.plan import HostPlan, Plan
from rackrun.launcher.run.stragglers import (
    STEPS_JUDGED,
    Parts,
    SlowRank,
    parts_of,
    reported,
    straggler,
)

STEPS_REMEMBERED = 64  # of a rank, whose median is the pace that its hang limit goes by


@dataclass
class RankState:
    """One rank, as its reports and its shim describe it."""

    rank: int
    node: int
    pid: int = 0
    ended: RankEnded | None = None
    phase: str = ""
    """The phase that it reported, `train` if it names none; empty when it never reported."""
    step: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    """The newest value of everything it reported, each of its type (see `supervision.reports`)."""
    moved_at: float = 0.0
    """When it last reported progress; before its first report, when it started."""
    computed_at: float = -math.inf
    """When it last computed, as long as no step has shown how long steps take."""
    first_step: int = 0
    first_step_at: float = 0.0
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    parts: deque[Parts] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    """The rank's own seconds in its last steps."""

    def report(self, fields: Mapping[str, Any], now: float) -> None:
        """Take a report; progress is a new phase, or another step in it.

        Of a rank that counts no steps, every report is progress: it shows nothing else.
        """
        before = (self.phase, self.fields.get("epoch"), self.step, self.fields.get("epoch_step"))
        step: int = fields.get("step", self.step)
        phase: str = fields.get("phase") or self.phase or phases.TRAIN
        if phase == self.phase == phases.TRAIN and step > self.step > 0:
            self.step_seconds.append((now - self.moved_at) / (step - self.step))
            self.computed_at = -math.inf
        if step > self.step and (parts := parts_of(fields)):
            self.parts.append(parts)
        if not self.first_step_at and phase == phases.TRAIN and step > 0:
            self.first_step, self.first_step_at = step, now
        self.phase, self.step = phase, step
        self.fields.update(fields)
        after = (self.phase, self.fields.get("epoch"), self.step, self.fields.get("epoch_step"))
        counts_steps = self.step > 0 or "epoch_step" in self.fields
        if after != before or not counts_steps:
            self.moved_at = now

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds left at the pace so far; None before that can be known."""
        steps = self.fields.get("steps")
        done = self.step - self.first_step
        if not isinstance(steps, int) or done <= 0:
            return None
        return max(0.0, (now - self.first_step_at) / done * (steps - self.step))

    @property
    def running(self) -> bool:
        """Return True while its command runs."""
        return bool(self.pid) and self.ended is None


@dataclass
class HostState:
    """One host, as its agent describes it."""

    plan: HostPlan
    started_at: float
    """When its agent was started."""
    state: str = "connecting"
    """connecting, starting, running, stopping, done; at the end clean, not clean, lost, ..."""
    opened_at: float | None = None
    usage: Usage | None = None
    joined: bool = False
    """Whether its torchrun has met the one on the first host."""
    frozen: tuple[str, ...] = ()
    frozen_since: float = 0.0
    port: int = 0
    """The port at which the other hosts try to reach it."""
    unreached: Unreached | None = None
    """What it found when it called the others; None before it was asked to."""
    lost: Lost | None = None
    lost_at: float = 0.0
    closed: Closed | None = None
    swept: Swept | None = None

    def take(self, event: Event, now: float) -> None:
        """Apply an event that is about the host itself."""
        match event:
            case Opened():
                self.opened_at, self.port = now, event.port
                self.state = "starting"
            case Usage():
                self.usage = event
            case Frozen():
                self.frozen, self.frozen_since = event.names, now
            case Joined():
                self.joined = True
            case Unreached():
                self.unreached = event
            case Stopping():
                self.state = "stopping"
            case Lost():
                self.lost, self.lost_at, self.state = event, now, "lost"
            case Closed():
                self.closed, self.state = event, "not clean" if event.survivors else "clean"
            case Swept():
                self.swept = event
                self.state = (
                    "not verified" if event.reason else "not clean" if event.survivors else "clean"
                )

    @property
    def over(self) -> bool:
        """Return True when nothing more will come from its agent."""
        return self.closed is not None or self.lost is not None

    @property
    def end_state(self) -> str:
        """Return the host's final state: clean, what is left, or why it is unknown."""
        for event in (self.swept, self.closed):
            if event is not None and event.survivors:
                return f"still running: {', '.join(event.survivors)}"
        if self.swept is not None and self.swept.reason:
            return f"not verified: {self.swept.reason}"
        if self.swept or self.closed:
            return "clean"
        return f"not verified: {self.lost.reason}" if self.lost else "not verified"


class RunState:
    """All hosts and ranks of a plan."""

    def __init__(self, plan: Plan, now: float) -> None:
        self.plan = plan
        self.started_at = now
        self.gathering_at = now
        """When a host got further on its way to start ranks."""
        self.printed_at = now
        """When a rank last wrote something."""
        self.hosts = [HostState(host, now) for host in plan.hosts]
        self.ranks = [
            RankState(number, host.node)
            for host in plan.hosts
            for number in range(host.first_rank, host.first_rank + host.processes)
        ]
        self._late: SlowRank | None = None
        """The straggler by what ranks reported of their own part of steps."""

    def take(self, event: Event, now: float) -> None:
        """Apply an event to the state of its host and rank."""
        host = self.host(event.node)
        if isinstance(event, Opened | Joined):
            self.gathering_at = now
        match event:
            case Output():  # first, as most events are output
                self.printed_at = now
            case Report() | RankStarted() | Computing() | RankEnded():
                self._take_rank_event(event, now)
            case _:
                host.take(event, now)

    def _take_rank_event(
        self, event: Report | RankStarted | Computing | RankEnded, now: float
    ) -> None:
        rank, host = self.rank(event.rank), self.host(event.node)
        match event:
            case Report():
                rank.report(event.fields, now)
                if rank is self.lead:
                    self._compare_parts()
            case RankStarted():
                rank.pid = rank.pid or event.pid
                rank.moved_at = rank.moved_at or now
                host.state = "running"
            case Computing():
                rank.computed_at = -math.inf if rank.step_seconds else now
            case RankEnded():
                rank.ended = rank.ended or event  # a rank ends once
                if all(rank.ended for rank in self.ranks_of(event.node)):
                    host.state = "done" if host.state == "running" else host.state

    def ranks_of(self, node: int) -> list[RankState]:
        """Return the ranks of one host."""
        plan = self.plan.host(node)
        first = plan.first_rank - self.plan.hosts[0].first_rank
        return self.ranks[first : first + plan.processes]

    def host(self, node: int) -> HostState:
        """Return the host with this node rank."""
        return self.hosts[node - self.plan.hosts[0].node]

    def host_of(self, number: int) -> HostState | None:
        """Return the host of the rank of this number; None when it is not one of these."""
        nodes = (rank.node for rank in self.ranks if rank.rank == number)
        return next((self.host(node) for node in nodes), None)

    def rank(self, number: int) -> RankState:
        """Return the rank of this number."""
        return self.ranks[number - self.plan.hosts[0].first_rank]

    @property
    def lead(self) -> RankState:
        """Return the rank that reports for all."""
        return self.ranks[0]

    @property
    def slow(self) -> SlowRank | None:
        """Return the rank that holds up the others, or None."""
        return reported(self.lead.fields) or self._late

    def _compare_parts(self) -> None:
        # Of the same stretch of time.
        if all(len(rank.parts) == STEPS_JUDGED for rank in self.ranks):
            hosts = {rank.rank: self.host(rank.node).plan.name for rank in self.ranks}
            self._late = straggler({rank.rank: rank.parts for rank in self.ranks}, hosts)
            for rank in self.ranks:
                rank.parts.clear()

    @property
    def slow_host(self) -> HostState | None:
        """The host that holds up the others; None when it is unknown, or there are no others."""
        return self.host_of(self.slow.rank) if self.slow and len(self.hosts) > 1 else None

    @property
    def running(self) -> Iterator[RankState]:
        """The ranks whose command runs now."""
        return (rank for rank in self.ranks if rank.running)

    @property
    def is_cut_off(self) -> bool:
        """Return True if several hosts were lost and no other is left: our own link is down."""
        return len(self.hosts) > 1 and all(
            host.lost and host.lost.exit_code == HostLost.exit_code and host.opened_at is not None
            for host in self.hosts
        )

    @property
    def succeeded(self) -> bool:
        """Return True when every rank of every host has ended with 0."""
        return all(rank.ended is not None and rank.ended.exit_code == 0 for rank in self.ranks)

    def forgive(self, seconds: float) -> None:
        """Restart all clocks: a pause of the launcher is no host's fault."""
        self.gathering_at += seconds
        self.printed_at += seconds
        for rank in self.ranks:
            rank.moved_at += seconds
            rank.computed_at += seconds
        for host in self.hosts:
            host.frozen_since += seconds
