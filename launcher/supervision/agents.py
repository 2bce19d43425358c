"""The agents of a run, one per host: started and stopped together, and replaced when lost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from launcher.run.events import Lost, Swept
from launcher.run.hosts import Host
from launcher.run.job import Limits
from launcher.run.plan import Environment, HostPlan, Plan
from launcher.run.state import HostState, RunState
from launcher.supervision import agent_protocol
from launcher.supervision.agent_client import AgentClient, EventQueue, HeartbeatSender
from launcher.transport.base import Transport
from rackrun.light_dataclass import dataclass

_TURN_COUNTS_SECONDS = 0.5  # the rest of a longer turn is the launcher's own lag
QUEUED_EVENTS = 128  # of 64 KiB at most: then the readers wait, and so do the hosts


@dataclass(frozen=True)
class AddedHost:
    """A host that an elastic run gets while it goes on: it has passed the checks."""

    host: Host
    plan: HostPlan
    transport: Transport


class AgentGroup:
    """The clients of all agents of a run, in the order of its hosts, and their queue of events."""

    def __init__(self, plan: Plan, transports: Sequence[Transport]) -> None:
        """Start nothing yet; `transports` are those of the plan's hosts, in its order."""
        self.plan = plan
        self.events = EventQueue(QUEUED_EVENTS)
        self.clients = [
            AgentClient(transport, host, self.events)
            for transport, host in zip(transports, plan.hosts, strict=True)
        ]

    def add(self, host: AddedHost) -> None:
        """Take in a host that the run has got, behind all others, and start nothing there yet."""
        self.clients.append(AgentClient(host.transport, host.plan, self.events))

    def of(self, node: int) -> AgentClient:
        """Return the client of the host with this node rank."""
        return self.clients[node - self.plan.hosts[0].node]

    def start(self, limits: Limits, secrets: Environment) -> None:
        """Start every agent, each on a separate thread."""
        agent_protocol.program()  # kept: else the first threads would each pack their own
        self._limits, self._secrets = limits, secrets
        for client in self.clients[: len(self.clients) - self.plan.spares]:
            client.start(limits, secrets)

    def start_again(self, node: int) -> None:
        """Start an agent on a host of an elastic run, the first one or another one."""
        client = self.of(node)
        client = AgentClient(client.transport, client.plan, self.events, is_first=False)
        self.clients[node - self.plan.hosts[0].node] = client
        client.start(self._limits, self._secrets)

    def has_ended(self, node: int) -> bool:
        """Return whether all events of the agent on a host, or of its clean-up, were taken."""
        return self.of(node).has_ended and self.events.empty()

    def heartbeat(self, limits: Limits) -> HeartbeatSender:
        """Return a context in which every agent gets heartbeats, three per timeout."""
        return HeartbeatSender(self.clients, limits.lease_seconds / 3)

    def stop(self, order: bytes) -> None:
        """Send every agent the order to stop."""
        for client in self.clients:
            client.stop(order)

    def join(self, hosts: Sequence[HostState], seconds: float) -> None:
        """Wait up to `seconds` for the threads of all agents that have confirmed the end."""
        deadline = time.monotonic() + seconds
        for client, host in zip(self.clients, hosts, strict=True):
            if host.closed:
                client.join(max(0.0, deadline - time.monotonic()))

    def clean_up(self, node: int) -> Swept | None:
        """Clean up after a lost agent; return the outcome at once if it had started nothing."""
        client = self.of(node)
        if client.channel is not None:
            client.clean_up()
            return None
        return Swept(node, reason="the agent was just being started" if client.opening else "")


class SilenceDetector:
    """Finds the hosts whose agents are silent.

    Time counts only while the launcher could read messages. Its threads share a core: with hundreds
    of hosts a turn may take seconds, and a suspended launcher reads nothing at all.
    """

    def __init__(self, run: RunState, agents: AgentGroup, limits: Limits) -> None:
        self._run = run
        self._agents = agents
        self._limits = limits
        self._looked_at = time.monotonic()
        self._silent: dict[AgentClient, tuple[float, float]] = {}
        """When a host was heard last, and the seconds of listening since then."""

    def lost(self, now: float, deadline: float | None) -> Iterator[Lost]:
        """Yield the hosts to give up on; `deadline`: when all must have confirmed their end."""
        listened = min(now - self._looked_at, _TURN_COUNTS_SECONDS)
        self._looked_at = now
        limits = self._limits
        for host, client in zip(self._run.hosts, self._agents.clients, strict=True):
            if host.over:
                continue
            silent = self._silence(client, listened)
            reason = ""
            if host.opened_at is None and now - host.started_at > limits.start_seconds:
                reason = f"no agent answered within {limits.start_seconds:g} s"
            elif host.opened_at is not None and silent > limits.lease_seconds:
                reason = f"silent for {silent:.0f} s"
            elif deadline is not None and now > deadline:
                reason = "did not confirm its end"
            if reason:
                yield Lost(host.plan.node, reason)

    def _silence(self, client: AgentClient, listened: float) -> float:
        """Return for how long a host has been silent, after `listened` more seconds."""
        # A reader that waits for space on the queue is delayed by the launcher, not by its host.
        heard_at, silent = self._silent.get(client, (client.heard_at, 0.0))
        silent = 0.0 if client.blocked or client.heard_at != heard_at else silent + listened
        self._silent[client] = client.heard_at, silent
        return 0.0 if silent > self._limits.lease_seconds and client.is_unread else silent
