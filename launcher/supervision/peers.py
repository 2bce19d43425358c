"""The other nodes of a run that was started node by node.

Every node has its own launcher, which sees only its own ranks. Over the connections of the
rendezvous, each one sends the others its first failure, requests to stop, and how long its ranks
may make no progress; node 0 forwards these. So all nodes end together, with one root cause and one
exit code.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from msgspec import structs

from rackrun.launcher.errors import HostLost
from rackrun.launcher.rendezvous.connection import PeerConnection
from rackrun.launcher.rendezvous.gather import Rendezvous
from rackrun.launcher.run.events import PeerEvent, PeerFailed, PeerHangLimit, PeerStops
from rackrun.launcher.supervision.agents import EventQueue
from rackrun.launcher.supervision.root_cause import FailureLog
from rackrun.shapes import Misshapen, Shape, shaped
from rackrun.terminal import one_line

TEXT_LETTERS = 4096
LAUNCHER_GONE = "its launcher is gone"
NONSENSE = "its launcher sent data that is not the protocol of peers"
EXPLANATION_SECONDS = 5.0  # for another node to report the failure that ours followed from


class PeerMessage(Shape, frozen=True):
    """One line from another node; exactly one field is set."""

    failed: PeerFailed | None = None
    stop: PeerStops | None = None
    hang_limit: PeerHangLimit | None = None
    done: bool = False


class Peers:
    """The other nodes, as a context; leaving it without an exception is a regular end."""

    def __init__(self, node: int, rendezvous: Rendezvous) -> None:
        self.node = node
        self.names = rendezvous.agreement.names
        self.connections = rendezvous.connections
        self._sent: set[bool] = set()
        """The kinds of failures that were sent to the others: secondary, or primary."""
        self._failed_at = 0.0
        self._stopped = False
        self._leaving = False
        self._sent_limit = 0.0
        self._hang_limits: dict[int, float] = {}
        """How long the ranks of other nodes may go without progress, by node."""

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leaving = True  # set first: connections that end from now on are no losses
        for connection in self.connections.values():
            if error is None:
                connection.send(done=True)
            connection.close()

    def listen(self, events: EventQueue) -> None:
        """Turn their messages into events, on a thread for each connection."""
        for node, connection in self.connections.items():
            arguments = (node, connection, events)
            threading.Thread(target=self._listen, args=arguments, daemon=True).start()

    def send_failure(self, failures: FailureLog, now: float) -> None:
        """Send our root cause, so that the other nodes end too; again only when it has changed."""
        self._failed_at = self._failed_at or now
        cause, is_secondary = failures.root_cause(), failures.is_secondary
        if cause.node is None or is_secondary in self._sent:  # another node's, or sent already
            return
        self._sent |= {True, is_secondary}  # a primary failure makes later secondary ones needless
        text = one_line(cause.text)
        if cause.rank is not None:
            text = f"rank {cause.rank}: {text}"
        failed = PeerFailed(self.node, text[:TEXT_LETTERS], cause.exit_code, is_secondary)
        self._send(failed=structs.asdict(failed))

    def may_explain(self, failures: FailureLog, now: float) -> bool:
        """Return whether another node may soon report the failure that caused ours."""
        is_recent = now - self._failed_at <= EXPLANATION_SECONDS
        return bool(failures) and is_recent and failures.is_secondary

    def send_stop(self, signum: int) -> None:
        """Ask the other nodes to save and to end, once."""
        if not self._stopped:
            self._stopped = True
            self._send(stop={"node": self.node, "signal": signum})

    def send_hang_limit(self, seconds: float) -> None:
        """Send how long our ranks may make no progress, unless it has hardly changed."""
        if not 0.8 * self._sent_limit <= seconds <= 1.25 * self._sent_limit:
            self._sent_limit = seconds
            self._send(hang_limit={"node": self.node, "seconds": seconds})

    def take_hang_limit(self, event: PeerHangLimit) -> None:
        """Record how long the ranks of another node may make no progress."""
        self._hang_limits[event.node] = event.seconds

    @property
    def hang_limit(self) -> float:
        """The longest time that ranks of any other node may make no progress now."""
        return max(self._hang_limits.values(), default=0.0)

    def _send(self, **message: dict[str, Any]) -> None:
        self._forward(message, self.node)

    def _forward(self, message: dict[str, Any], origin: int) -> None:
        for node, connection in self.connections.items():
            if node != origin:
                connection.send(**message)

    def _listen(self, node: int, connection: PeerConnection, events: EventQueue) -> None:
        why = LAUNCHER_GONE
        try:
            while fields := connection.receive():
                message: PeerMessage = shaped(fields, PeerMessage)
                if message.done:
                    return
                for event in (message.failed, message.stop, message.hang_limit):
                    if event is not None:
                        self._take(event, node, events)
                if self.node == 0:
                    self._forward(fields, node)
        except Misshapen:
            connection.close()
            why = NONSENSE
        if self._leaving:
            return
        lost = PeerFailed(node, why, HostLost.exit_code)
        self._take(lost, node, events)
        if self.node == 0:
            self._forward({"failed": structs.asdict(lost)}, node)

    def _take(self, event: PeerEvent, node: int, events: EventQueue) -> None:
        """Queue what a node has sent; raise Misshapen unless it may send that."""
        # Only node 0 speaks for others, whose messages it forwards, and nobody speaks for us.
        if (
            event.node >= len(self.names)
            or event.node == self.node
            or (node and event.node != node)
        ):
            raise Misshapen("speaks for another node")
        if isinstance(event, PeerFailed):
            event = structs.replace(event, name=self.names[event.node])
        elif isinstance(event, PeerStops):
            self._stopped = True  # the others have been asked by now: we need not ask them
        events.put(event)
