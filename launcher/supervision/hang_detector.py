"""Detect hangs in a run, after every host has tested whether it can reach the others."""

from __future__ import annotations

import math

from launcher.run.job import Limits
from launcher.run.state import RunState
from launcher.supervision.agent_protocol import reach_order
from launcher.supervision.agents import AgentGroup
from launcher.supervision.hangs import (
    Hang,
    current_hang_limit,
    find_absent,
    find_hang,
    may_stall,
    split_network,
)

_STALL_SHARE = 1 / 3  # of the limit, after which a standstill is reported, but ends nothing yet
_REACH_SECONDS = 2.0  # for hosts to reach one another


class HangDetector:
    """Watches for ranks that do not start or make no progress."""

    def __init__(self, run: RunState, agents: AgentGroup, limits: Limits) -> None:
        """Begin with nothing tested."""
        self._run = run
        self._agents = agents
        self._limits = limits
        self._tested_at: float | None = None
        self._limit = 0.0
        """For how long ranks may make no progress, at the last look; 0: all made some."""
        self._eased = 0.0
        """The same, with what was allowed before the limit fell."""
        self._eased_at = -math.inf

    def stall(self, now: float, others_limit: float) -> tuple[Hang, float] | None:
        """Return a standstill that may become a hang, and after how many seconds; None if none is.

        `others_limit`: the seconds that ranks of other launchers may go without progress.
        """
        run, limits = self._run, self._limits
        if not may_stall(run, _STALL_SHARE * limits.hang_seconds, now):
            self._limit = 0.0
            return None
        self._ease(current_hang_limit(run, limits, now, others_limit), now)
        stall = find_hang(run, limits, now, self._eased, _STALL_SHARE)
        is_frozen = any(host.frozen for host in run.hosts)
        return (stall, limits.hang_seconds if is_frozen else self._eased) if stall else None

    def _ease(self, limit: float, now: float) -> None:
        """Take the limit; a shorter one counts from now on, for a time that a longer one allowed.

        Ranks that wait for one that saves have its limit. When it has saved, they still have to
        make their step.
        """
        if limit < self._limit:
            self._eased, self._eased_at = self._limit + limit, now
        elif now - self._eased_at > limit:
            self._eased = limit
        self._limit, self._eased = limit, max(limit, self._eased)

    def hang(self, now: float) -> Hang | None:
        """Return a hang, with its cause where that is the network; None while hosts test it.

        To be asked after `stall`.
        """
        run, limits = self._run, self._limits
        hang = find_absent(run, limits, now) or find_hang(run, limits, now, self._eased)
        if hang is None:
            self._tested_at = None  # the next hang needs a new test
            return None
        # Ranks on both sides of a cut network hang as well: no rank is named before the test.
        return split_network(hang, run) if self._network_is_tested(now) else None

    def _network_is_tested(self, now: float) -> bool:
        """Return whether all hosts have reported which others they reach; order the test first."""
        if self._tested_at is None:
            self._tested_at = now
            self._order_test()
        reported = all(host.unreached or host.over for host in self._run.hosts)
        return reported or now - self._tested_at > 2 * _REACH_SECONDS

    def _order_test(self) -> None:
        ports = [(host.plan.address, host.port) for host in self._run.hosts if host.port]
        for client, host in zip(self._agents.clients, self._run.hosts, strict=True):
            others = [port for port in ports if port[0] != host.plan.address]
            host.unreached = None
            client.send(reach_order(others, _REACH_SECONDS))
