"""The end of a run: order every host to end its ranks, and wait until it has."""

from __future__ import annotations

import signal

from rackrun.launcher.remote.processes import KILL_SECONDS
from rackrun.launcher.run.settings import Limits
from rackrun.launcher.run.state import HostState, RunState
from rackrun.launcher.supervision.agent_protocol import stop_order
from rackrun.launcher.supervision.agents import AgentGroup

LAST_EVENT_SECONDS = 5.0
CLEANUP_SECONDS = 30.0  # for a second agent to end what the first one left

_FORCED_SECONDS = 4.5  # for all of that after a second Ctrl-C
_CONFIRM_SECONDS = 3.0  # of these for the first agent
_CONNECT_SECONDS = 4.5  # for a second agent to answer, where the first one was silent


class Shutdown:
    """Orders the end of a run, and decides when each of its hosts is done."""

    def __init__(self, run: RunState, agents: AgentGroup, limits: Limits) -> None:
        self._run = run
        self._agents = agents
        self._limits = limits
        self._forced_at: float | None = None
        self.deadline: float | None = None
        """When every host must have confirmed its end; None while the run goes on."""

    @property
    def ordered(self) -> bool:
        """Return whether the ranks have been ordered to end."""
        return self.deadline is not None

    def order(self, signum: int, grace_seconds: float, now: float) -> None:
        """Order every host to send its ranks a signal, and SIGKILL after the grace."""
        deadline = now + grace_seconds + KILL_SECONDS + LAST_EVENT_SECONDS
        # A later order may bring the end nearer, never put it off.
        self.deadline = deadline if self.deadline is None else min(deadline, self.deadline)
        self._agents.stop(stop_order(signum, grace_seconds))

    def force(self, now: float) -> None:
        """Order all processes killed, and wait only briefly for hosts, as after a second Ctrl-C."""
        self._forced_at = self._forced_at or now
        self.order(signal.SIGKILL, 0, now)
        self.deadline = self._forced_at + _CONFIRM_SECONDS

    def is_complete(self, now: float) -> bool:
        """Return whether every host has ended, or cannot be verified."""
        return all(
            host.closed is not None or host.swept is not None or self._is_unverifiable(host, now)
            for host in self._run.hosts
        )

    def waits_for_silence(self, now: float) -> bool:
        """Return whether all hosts have ended but those that were lost in silence."""
        left = [host for host in self._run.hosts if host.closed is None and host.swept is None]
        return all(self._is_silent(host) or self._is_unverifiable(host, now) for host in left)

    def _is_unverifiable(self, host: HostState, now: float) -> bool:
        """Return whether a lost host has had its time to answer a second agent."""
        if host.lost is None:
            return False
        if self._forced_at is not None and now - self._forced_at > _FORCED_SECONDS:
            return True
        # A host that was silent before it was lost gets more time only once it has answered.
        limit = _CONNECT_SECONDS if self._is_silent(host) else CLEANUP_SECONDS
        return now - host.lost_at > limit

    def _is_silent(self, host: HostState) -> bool:
        """Return whether a lost host was silent before that, and still is."""
        heard_at = self._agents.of(host.plan.node).heard_at
        was_silent = host.lost_at - heard_at > self._limits.lease_seconds or host.opened_at is None
        return host.lost is not None and was_silent and heard_at < host.lost_at
