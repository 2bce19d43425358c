"""The launcher's side of one agent: a thread that reads its events, and a channel for orders."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from launcher.errors import HostLost
from launcher.run.events import Closed, Event, Lost, Swept
from launcher.run.job import Limits
from launcher.run.plan import Environment, HostPlan
from launcher.supervision import agent_protocol
from launcher.transport import bootstrap
from launcher.transport.base import Channel, Transport
from rackrun.errors import Problem


class EventQueue(queue.Queue[Event]):
    """The queue of the events of all agents; readers wait if it is full."""

    def get_all(self, seconds: float, most: int) -> list[Event]:
        """Wait for an event and return up to `most`; raise queue.Empty after `seconds`.

        The lock is taken twice, not once per event: hundreds of readers compete for it.
        """
        first = self.get(timeout=seconds)
        with self.mutex:
            others = [self.queue.popleft() for _ in range(min(most - 1, len(self.queue)))]
            self.not_full.notify(len(others))
        return [first, *others]


class AgentClient:
    """The agent of one host: started, given orders, read from, and replaced when it is lost."""

    def __init__(
        self, transport: Transport, plan: HostPlan, events: EventQueue, is_first: bool = True
    ) -> None:
        """Start nothing yet; `is_first`: the transport starts the agent in its container, if any.

        It does that once, for the program that takes over from the preflight's.
        """
        self.transport = transport
        self._is_first = is_first
        self._threads: list[threading.Thread] = []
        self.plan = plan
        self.events = events
        self.channel: Channel | None = None
        """Set once the agent has its first order."""
        self.opening = False
        """Whether the agent is being started, and may already have its first order."""
        self.last_order = b""
        """The order to stop; an agent that is still starting gets it, too."""
        self.heard_at = time.monotonic()
        self.blocked = False
        """Whether the reader waits because the queue is full: then the host is not silent."""

    def start(self, limits: Limits, secrets: Environment = ()) -> None:
        """Start the agent on a separate thread; everything else arrives as an event."""
        order = agent_protocol.run_order(self.plan, limits, secrets, self._is_first)
        self._begin(self._relay, order)

    def _begin(self, target: Callable[..., None], *args: bytes) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the agent's exit after its last event."""
        self._threads[0].join(seconds)

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more comes from the agent, nor from a clean-up after it."""
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self, order: bytes) -> None:
        """Send the order to stop, now or as soon as the agent has started."""
        self.last_order = order
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

    def clean_up(self) -> None:
        """Start a second agent that ends what a lost one left; the outcome arrives as `Swept`.

        The first one, if it lives, sees the end of its stream.
        """
        if self.channel is not None:
            self.channel.close()
        self._begin(self._clean_up)

    def _relay(self, order: bytes) -> None:
        """Put every event of the agent on the queue, from its start to the end of its stream."""
        try:
            if self.last_order:
                raise HostLost("stopped before it was started")
            self.opening = True
            channel = self._open(order, () if self._is_first else self.plan.container)
        except Problem as error:
            self.opening = False
            self.events.put(Lost(self.plan.node, str(error), error.exit_code))
            return
        # The order matters: `stop` sets last_order before it looks at the channel, so whichever
        # thread is second sees what the first one set, and the order to stop is never lost.
        self.channel = channel
        if self.last_order:
            self.send(self.last_order)
        closed = False
        for event in self._received(channel):
            closed = closed or isinstance(event, Closed)
            self._put(event)
        if not closed:
            reason = bootstrap.last_words(channel.complaint())
            self.events.put(Lost(self.plan.node, reason or "its agent ended unexpectedly"))

    def _put(self, event: Event) -> None:
        """Put an event on the queue, as soon as there is space."""
        self.blocked = True
        self.events.put(event)
        # Silence counts from now: bytes that the host has sent meanwhile are unread in the kernel.
        self.heard_at = time.monotonic()
        self.blocked = False

    def _open(self, order: bytes, container: Sequence[str] = ()) -> Channel:
        channel = self.transport.open((*container, *bootstrap.bootstrap(self.plan.agent_python)))
        try:
            channel.send(agent_protocol.opening(order))
        except HostLost as error:
            channel.close()
            drain(channel)  # standard error is complete only at the end of the stream
            raise HostLost(bootstrap.last_words(channel.complaint()) or str(error)) from error
        return channel

    def _received(self, channel: Channel) -> Iterator[Event]:
        """Yield the events of one agent until its stream ends or breaks the protocol."""
        decoder = agent_protocol.Decoder(self.plan)
        while data := channel.receive():
            self.heard_at = time.monotonic()
            try:
                yield from decoder.feed(data)
            except HostLost as error:
                yield Lost(self.plan.node, str(error))
                channel.close()
                drain(channel)
                return

    def _clean_up(self) -> None:
        """Start a second agent, order the clean-up, and wait for its outcome."""
        outcome = Swept(self.plan.node, reason="the second agent ended unexpectedly")
        try:
            channel = self._open(agent_protocol.sweep_order(self.plan))
        except Problem as error:
            outcome = Swept(self.plan.node, reason=str(error))
        else:
            for event in self._received(channel):
                if isinstance(event, Closed):
                    outcome = Swept(self.plan.node, event.survivors)
        self.events.put(outcome)


def drain(channel: Channel) -> None:
    """Read a closed channel to its end."""
    while channel.receive():
        pass


class HeartbeatSender:
    """Sends a heartbeat to every agent, from a thread that nothing else can delay.

    The supervisor's own thread may wait for a slow terminal or disk, and hosts must not end the run
    because of that.
    """

    def __init__(self, clients: Sequence[AgentClient], every_seconds: float) -> None:
        """Take `every_seconds`, a fraction of the heartbeat timeout of the agents."""
        self.clients = clients
        self.every_seconds = every_seconds
        self.ended = threading.Event()

    def __enter__(self) -> HeartbeatSender:
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.ended.set()

    def _beat(self) -> None:
        while not self.ended.wait(self.every_seconds):
            # A host that takes nothing delays the others' heartbeats by a second, not by a timeout.
            for client in self.clients:
                client.send(agent_protocol.BEAT)
