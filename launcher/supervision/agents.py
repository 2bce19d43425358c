"""The agents of a run, one per host: started, read from and ordered together, replaced when lost.

A thread per agent reads its events and puts them on a common queue; orders are sent from the main
thread, heartbeats from a thread of their own.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from rackrun.errors import Problem
from rackrun.launcher.errors import HostLost
from rackrun.launcher.run.events import Closed, Event, Lost, Swept
from rackrun.launcher.run.job import START_SECONDS
from rackrun.launcher.run.plan import HostPlan, Plan
from rackrun.launcher.run.planned_host import Environment
from rackrun.launcher.run.settings import Limits
from rackrun.launcher.run.state import HostState, RunState
from rackrun.launcher.supervision import agent_protocol
from rackrun.launcher.transport import bootstrap
from rackrun.launcher.transport.base import Channel, Transport
from rackrun.launcher.transport.rpc import RpcClient

_TURN_COUNTS_SECONDS = 0.5  # the rest of a longer turn is the launcher's own lag
QUEUED_EVENTS = 128  # of 64 KiB at most: then the readers wait, and so do the hosts


EventQueue: TypeAlias = queue.Queue[Event]
"""The events of all agents; readers wait if it is full."""


class AgentClient:
    """The launcher's side of the agent of one host: a reader thread, and a channel for orders."""

    def __init__(
        self, transport: Transport, probe: RpcClient | None, plan: HostPlan, events: EventQueue
    ) -> None:
        """Start nothing yet; `probe` is the program on the host that is to become the agent."""
        self.transport = transport
        self._probe = probe
        self._threads: list[threading.Thread] = []
        self.plan = plan
        self.events = events
        self.channel: Channel | None = None
        """Set once the agent has its first order."""
        self.opening = False
        """Whether the agent is being started, and may already have its first order."""
        self.order_to_stop = b""
        """Empty until it is sent; an agent that is still starting then gets it, too."""
        self.heard_at = time.monotonic()
        self.blocked = False
        """Whether the reader waits because the queue is full: then the host is not silent."""

    def start(self, limits: Limits, secrets: Environment = ()) -> None:
        """Start the agent on a separate thread; everything else arrives as an event."""
        order = agent_protocol.run_order(self.plan, limits, secrets)
        self._start_thread(self._relay, order)

    def clean_up(self) -> None:
        """Start a second agent that ends what a lost one left; the outcome arrives as `Swept`."""
        if self.channel is not None:
            self.channel.close()  # the first agent, if it lives, sees the end of its stream
        self._start_thread(lambda: self.events.put(self.sweep()))

    def _start_thread(self, target: Callable[..., None], *args: bytes) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the agent's exit after its last event."""
        self._threads[0].join(seconds)

    def stop(self, order: bytes) -> None:
        """Send the order to stop, now or as soon as the agent has started."""
        self.order_to_stop = order
        self.send(order)

    def send(self, order: bytes) -> None:
        """Send an order; a host that does not receive it is detected by its silence."""
        channel = self.channel
        if channel is not None:
            with contextlib.suppress(HostLost):
                channel.send(order)

    @property
    def is_unread(self) -> bool:
        """Return True if bytes of the host have arrived that the reader has not read yet."""
        return self.channel is not None and self.channel.is_unread()

    def _relay(self, order: bytes) -> None:
        """Start the agent, and put its events on the queue until the end of its stream."""
        try:
            if self.order_to_stop:
                raise HostLost("stopped before it was started")
            self.opening = True
            channel, early = self._open(order)
        except Problem as error:
            self.opening = False
            self.events.put(Lost(self.plan.node, str(error), error.exit_code))
            return
        # The order matters: `stop` sets order_to_stop before it looks at the channel, so whichever
        # thread is second sees what the first one set, and the order to stop is never lost.
        self.channel = channel
        if self.order_to_stop:
            self.send(self.order_to_stop)
        closed = False
        for event in self._received(channel, early):
            closed = closed or isinstance(event, Closed)
            self.blocked = True
            self.events.put(event)  # waits for space
            # Silence counts from now: what the host has sent meanwhile is unread in the kernel.
            self.heard_at = time.monotonic()
            self.blocked = False
        if not closed:
            reason = bootstrap.last_error_line(channel.complaint())
            self.events.put(Lost(self.plan.node, reason or "its agent ended unexpectedly"))

    def sweep(self) -> Swept:
        """End what a lost agent has left, by a second one; return the outcome."""
        outcome = Swept(self.plan.node, reason="the second agent ended unexpectedly")
        try:
            client = RpcClient(self.transport, self.plan.agent_python)  # not in the container
            channel, early = client.hand_over(agent_protocol.sweep_order(self.plan))
        except Problem as error:
            return Swept(self.plan.node, reason=str(error))
        for event in self._received(channel, early):
            if isinstance(event, Closed):
                outcome = Swept(self.plan.node, event.survivors)
        return outcome

    def _open(self, order: bytes) -> tuple[Channel, bytes]:
        """Start the agent where the probe is, or anew if its connection broke meanwhile."""
        probe, self._probe = self._probe, None
        if probe is not None:
            with contextlib.suppress(Problem):
                return self._handed_over(probe, order)
            probe.close()
        return self._handed_over(RpcClient(self.transport, self.plan.agent_python), order)

    def _handed_over(self, client: RpcClient, order: bytes) -> tuple[Channel, bytes]:
        if self.plan.container:
            client.enter(self.plan.container, self.plan.agent_python)
        return client.hand_over(order)

    def _received(self, channel: Channel, early: bytes) -> Iterator[Event]:
        """Yield the events of an agent, of which these bytes have come already."""
        decoder = agent_protocol.Decoder(self.plan)
        while data := early or channel.receive():
            early = b""
            self.heard_at = time.monotonic()
            try:
                yield from decoder.feed(data)
            except HostLost as error:  # not the protocol: nothing more is read from this agent
                yield Lost(self.plan.node, str(error))
                channel.close()
                drain(channel)
                return


def drain(channel: Channel) -> None:
    """Read a closed channel to its end."""
    while channel.receive():
        pass


class AgentGroup:
    """The clients of all agents of a run, in the order of its hosts, and their queue of events."""

    def __init__(
        self,
        plan: Plan,
        transports: Sequence[Transport],
        probes: Sequence[RpcClient | None] = (),
    ) -> None:
        """Start nothing yet; all are those of the plan's hosts, in its order; no probes, or all."""
        self.plan = plan
        self.events = EventQueue(QUEUED_EVENTS)
        probes = probes or [None] * len(plan.hosts)
        self.clients = [
            AgentClient(transport, probe, host, self.events)
            for transport, probe, host in zip(transports, probes, plan.hosts, strict=True)
        ]

    def of(self, node: int) -> AgentClient:
        """Return the client of the host with this node rank."""
        return self.clients[node - self.plan.hosts[0].node]

    def start(self, limits: Limits, secrets: Environment) -> None:
        """Start every agent, each on a separate thread."""
        for client in self.clients:
            client.start(limits, secrets)

    @contextlib.contextmanager
    def heartbeat(self, limits: Limits) -> Iterator[None]:
        """Send every agent three heartbeats per timeout within this context.

        They come from a thread that nothing else can delay: the supervisor may wait for a slow
        terminal or disk, and hosts must not end the run because of that.
        """
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(limits.lease_seconds / 3):
                # A host that reads nothing delays the other heartbeats by a second, not a timeout.
                for client in self.clients:
                    client.send(agent_protocol.BEAT)

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            ended.set()

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
            # A reader that waits for space on the queue is delayed by the launcher, not its host.
            heard_at, silent = self._silent.get(client, (client.heard_at, 0.0))
            silent = 0.0 if client.blocked or client.heard_at != heard_at else silent + listened
            self._silent[client] = client.heard_at, silent
            reason = ""
            if host.opened_at is None and now - host.started_at > START_SECONDS:
                reason = f"no agent answered within {START_SECONDS:g} s"
            elif (
                host.opened_at is not None
                and silent > limits.lease_seconds
                and not client.is_unread  # asked last: it is a system call per host
            ):
                reason = f"silent for {silent:.0f} s"
            elif deadline is not None and now > deadline:
                reason = "did not confirm its end"
            if reason:
                yield Lost(host.plan.node, reason)
