"""The launcher's side of one agent: a thread that only reports, and a channel for orders."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence

from launcher.errors import HostLost
from launcher.run.events import Closed, Event, Lost, Swept
from launcher.run.job import Limits
from launcher.run.plan import Environment, HostPlan
from launcher.supervision import agent_protocol
from launcher.transport import bootstrap
from launcher.transport.base import Channel, Transport
from rackrun.errors import Problem

EventQueue = queue.Queue[Event]


class AgentClient:
    """One host of a run: opened, told what to do, listened to, and at last verified."""

    def __init__(self, place: Transport, plan: HostPlan, inbox: EventQueue) -> None:
        """Nothing is started yet."""
        self.place = place
        self.plan = plan
        self.inbox = inbox
        self.channel: Channel | None = None
        """Set once the agent has its first order."""
        self.opening = False
        """Its agent is being started, and may already have its first order."""
        self.last_order = b""
        """To stop; an agent that is only just being started gets it as well."""
        self.heard_at = time.monotonic()
        self.holding = False
        """Its news waits for the launcher: whoever is silent then, it is not the host."""

    def start(self, limits: Limits, secrets: Environment = ()) -> None:
        """Start the agent, on a thread of its own; everything else arrives as an event."""
        order = agent_protocol.run_order(self.plan, limits, secrets)
        self.thread = threading.Thread(target=self._relay, args=(order,), daemon=True)
        self.thread.start()

    def finish(self, seconds: float) -> None:
        """Wait for the agent's exit after its last word."""
        self.thread.join(seconds)

    def stop(self, order: bytes) -> None:
        """Give the order to stop, now or as soon as there is somebody to give it to."""
        self.last_order = order
        self.tell(order)

    def tell(self, order: bytes) -> None:
        """Give an order; a host that takes none is noticed by its silence."""
        channel = self.channel
        if channel is not None:
            with contextlib.suppress(HostLost):
                channel.send(order)

    def sweep(self) -> None:
        """Send a second agent after what a lost one left; its finding arrives as `Swept`.

        The first one, if it lives, sees the end of its stream.
        """
        if self.channel is not None:
            self.channel.close()
        threading.Thread(target=self._sweep, daemon=True).start()

    def _relay(self, order: bytes) -> None:
        """From the first byte to the last: put what the agent says on the queue."""
        try:
            if self.last_order:
                raise HostLost("stopped before it was started")
            self.opening = True
            channel = self._open(order)
        except Problem as error:
            self.opening = False
            self.inbox.put(Lost(self.plan.node, str(error), error.exit_code))
            return
        self.channel = channel
        if self.last_order:
            self.tell(self.last_order)
        closed = False
        for event in self._events(channel):
            closed = closed or isinstance(event, Closed)
            self._hand_over(event)
        if not closed:
            reason = channel.complaint() or "its agent ended without a word"
            self.inbox.put(Lost(self.plan.node, reason.splitlines()[-1]))

    def _hand_over(self, event: Event) -> None:
        """Put an event on the queue, as soon as there is room."""
        self.holding = True
        self.inbox.put(event)
        self.heard_at = time.monotonic()
        self.holding = False

    def _open(self, order: bytes) -> Channel:
        channel = self.place.open(bootstrap.bootstrap(self.plan.agent_python))
        try:
            channel.send(agent_protocol.opening(order))
        except HostLost as error:
            channel.close()
            drain(channel)
            raise HostLost(channel.complaint() or str(error)) from error
        return channel

    def _events(self, channel: Channel) -> Iterator[Event]:
        """All that one agent says, until its stream ends or makes no sense."""
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

    def _sweep(self) -> None:
        """Open, order, wait for the one answer."""
        answer = Swept(self.plan.node, reason="nobody could look")
        try:
            channel = self._open(agent_protocol.sweep_order(self.plan))
        except Problem as error:
            answer = Swept(self.plan.node, reason=str(error))
        else:
            for event in self._events(channel):
                if isinstance(event, Closed):
                    answer = Swept(self.plan.node, event.survivors)
        self.inbox.put(answer)


def drain(channel: Channel) -> None:
    """Let a closed channel come to its end."""
    while channel.receive():
        pass


class Heartbeat:
    """Renews the lease of every host, from a thread that nothing else can hold up."""

    def __init__(self, links: Sequence[AgentClient], every_seconds: float) -> None:
        """The beat is a third of the lease."""
        self.links = links
        self.every_seconds = every_seconds
        self.enough = threading.Event()

    def __enter__(self) -> Heartbeat:
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.enough.set()

    def _beat(self) -> None:
        while not self.enough.wait(self.every_seconds):
            for link in self.links:
                link.tell(agent_protocol.BEAT)
