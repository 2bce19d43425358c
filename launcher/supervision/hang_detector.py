"""Detect hangs in a run, after every host has tested whether it can reach the others."""

from __future__ import annotations

from launcher.run.job import Limits
from launcher.run.state import RunState
from launcher.supervision.agent_protocol import reach_order
from launcher.supervision.agents import AgentGroup
from launcher.supervision.hangs import Hang, find_absent, find_hang, split_network

_REACH_SECONDS = 2.0  # for hosts to reach one another


class HangDetector:
    """Watches for ranks that do not start or make no progress."""

    def __init__(self, run: RunState, agents: AgentGroup, limits: Limits) -> None:
        """Begin with nothing tested."""
        self._run = run
        self._agents = agents
        self._limits = limits
        self._tested_at: float | None = None

    def check(self, now: float, others_limit: float) -> Hang | None:
        """Return a hang, with its cause where that is the network; None while hosts test it.

        `others_limit`: the seconds that ranks of other launchers may go without progress.
        """
        run, limits = self._run, self._limits
        hang = find_absent(run, limits, now) or find_hang(run, limits, now, others_limit)
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
