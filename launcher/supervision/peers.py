"""The other nodes of a run that was started node by node.

Every node has its own launcher, which sees only its own ranks. Over the connections of the
rendezvous, each one sends the others its first failure, requests to stop, and how long its ranks
may make no progress; node 0 forwards these. So all nodes end together, with one root cause and one
exit code.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from launcher.errors import HostLost
from launcher.rendezvous.connection import PeerConnection
from launcher.rendezvous.gather import Rendezvous
from launcher.run.events import PeerEvent, PeerFailed, PeerHangLimit, PeerStops
from launcher.run.job import Limits
from launcher.run.state import RunState
from launcher.supervision.agent_client import EventQueue
from launcher.supervision.failures import FailureLog
from launcher.supervision.hangs import longest_hang_limit
from rackrun.light_dataclass import dataclass
from rackrun.shapes import Misshapen, shaped
from rackrun.terminal import one_line

TEXT_LETTERS = 4096
LAUNCHER_GONE = "its launcher is gone"
NONSENSE = "its launcher sent data that is not the protocol of peers"
EXPLANATION_SECONDS = 5.0  # for another node to report the failure that ours followed from


@dataclass(frozen=True)
class PeerMessage:
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
        self.sent: set[bool] = set()
        """The kinds of failures that were sent to the others: secondary, or primary."""
        self.stopped = False
        self.leaving = False
        self.hang_limit = 0.0

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leaving = True
        for connection in self.connections.values():
            if error is None:
                connection.send(done=True)
            connection.close()

    def listen(self, events: EventQueue) -> None:
        """Turn their messages into events, on a thread for each connection."""
        for node, connection in self.connections.items():
            arguments = (node, connection, events)
            threading.Thread(target=self._listen, args=arguments, daemon=True).start()

    def send_failure(self, text: str, exit_code: int, secondary: bool) -> None:
        """Send why this node ends, once per kind; `secondary`: probably because of another node."""
        if secondary in self.sent:
            return
        self.sent |= {True, secondary}  # a primary failure makes later secondary ones superfluous
        content = {"node": self.node, "text": text[:TEXT_LETTERS], "exit_code": exit_code}
        self._send("failed", {**content, "secondary": secondary})

    def send_stop(self, signum: int) -> None:
        """Ask the other nodes to save and to end, once."""
        if not self.stopped:
            self.stopped = True
            self._send("stop", {"node": self.node, "signal": signum})

    def send_hang_limit(self, seconds: float) -> None:
        """Send how long our ranks may make no progress, unless it has hardly changed."""
        if not 0.8 * self.hang_limit <= seconds <= 1.25 * self.hang_limit:
            self.hang_limit = seconds
            self._send("hang_limit", {"node": self.node, "seconds": seconds})

    def _send(self, kind: str, fields: dict[str, Any]) -> None:
        self._forward({kind: fields}, self.node)

    def _listen(self, node: int, connection: PeerConnection, events: EventQueue) -> None:
        """Turn the messages of one connection into events; node 0 forwards them to the others."""
        why = LAUNCHER_GONE
        try:
            while fields := connection.receive():
                message: PeerMessage = shaped(fields, PeerMessage)
                if message.done:
                    return
                for event in (message.failed, message.stop, message.hang_limit):
                    if event is not None:
                        self._check(event.node, node)
                        self._take(event, events)
                if self.node == 0:
                    self._forward(fields, node)
        except Misshapen:
            connection.close()
            why = NONSENSE
        if self.leaving:
            return
        lost = PeerFailed(node, why, HostLost.exit_code)
        self._take(lost, events)
        if self.node == 0:
            self._forward({"failed": asdict(lost)}, node)

    def _check(self, about: int, node: int) -> None:
        """Raise Misshapen for an unknown node, or if any but node 0 sends for another node."""
        if about >= len(self.names) or about == self.node or (node and about != node):
            raise Misshapen("speaks for another node")

    def _forward(self, fields: dict[str, Any], origin: int) -> None:
        for node, connection in self.connections.items():
            if node != origin:
                connection.send(**fields)

    def _take(self, event: PeerEvent, events: EventQueue) -> None:
        if isinstance(event, PeerFailed):
            event = replace(event, name=self.names[event.node])
        elif isinstance(event, PeerStops):
            self.stopped = True  # as the others have been asked by now, we need not ask them
        events.put(event)


class PeerUpdates:
    """What a supervisor exchanges with the other nodes: failures, requests to stop, hang limits."""

    def __init__(self, peers: Peers, run: RunState, failures: FailureLog) -> None:
        self._peers = peers
        self._run = run
        self._failures = failures
        self._hang_limits: dict[int, float] = {}
        """How long the ranks of other nodes may go without progress, by node."""
        self._failed_at = 0.0

    def listen(self, events: EventQueue) -> None:
        """Start to put reports of other nodes on the queue."""
        self._peers.listen(events)

    def take(self, event: PeerHangLimit) -> None:
        """Record how long the ranks of another node may make no progress."""
        self._hang_limits[event.node] = event.seconds

    def exchange_hang_limit(self, limits: Limits, now: float) -> float:
        """Send how long our ranks may make no progress; return the same for other nodes."""
        self._peers.send_hang_limit(longest_hang_limit(self._run, limits, now))
        return max(self._hang_limits.values(), default=0.0)

    def send_stop(self, signum: int) -> None:
        """Ask the other nodes to save and to end."""
        self._peers.send_stop(signum)

    def send_failure(self, now: float) -> None:
        """Send the root cause, so that the other nodes end too; again only when it has changed."""
        self._failed_at = self._failed_at or now
        cause = self._failures.root_cause()
        if cause.node is None:  # another node has reported it
            return
        who = "" if cause.rank is None else f"rank {cause.rank}: "
        self._peers.send_failure(
            who + one_line(cause.text), cause.exit_code, self._failures.is_secondary
        )

    def may_explain(self, now: float) -> bool:
        """Return whether another node may soon report the failure that caused ours."""
        if not self._failures or now - self._failed_at > EXPLANATION_SECONDS:
            return False
        return self._failures.is_secondary
