"""The other nodes of a run that was started node by node: how they end, and how we do.

Every node has its own launcher, which sees its own ranks only. Over the connections of the roll
call each one tells the others of its first failure, of a wish to stop, and for how long its ranks
may stand still; node 0 passes it on. So all nodes end together, with one cause and one exit code.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Annotated, Any

from launcher.errors import HostLost
from launcher.rendezvous.connection import PeerConnection
from launcher.rendezvous.gather import Rendezvous
from launcher.run.events import PeerFailed, PeerPatience, PeerStops
from launcher.run.hosts import MOST_HOSTS
from launcher.supervision.agent_client import EventQueue
from rackrun.shapes import AtMost, Between, Misshapen, shaped

TEXT_LETTERS = 4096
GONE = "its launcher is gone"
NONSENSE = "its launcher says what none of ours would"

Node = Annotated[int, Between(0, MOST_HOSTS)]


@dataclass(frozen=True)
class PeerFailure:
    """A node ends, and why."""

    node: Node
    text: Annotated[str, AtMost(TEXT_LETTERS)]
    exit_code: Annotated[int, Between(1, 255)]
    secondary: bool


@dataclass(frozen=True)
class Stop:
    """Somebody wants the run to end."""

    node: Node
    signal: Annotated[int, Between(1, 64)]


@dataclass(frozen=True)
class PeerPatienceTimer:
    """For how long ranks of a node may stand still."""

    node: Node
    seconds: Annotated[float, Between(0, 1e9)]


@dataclass(frozen=True)
class Words:
    """What one line of another node says."""

    failed: PeerFailure | None = None
    stop: Stop | None = None
    patience: PeerPatienceTimer | None = None
    done: bool = False


class Peers:
    """Everybody else, as a context: leaving it is a good end, whatever the run was."""

    def __init__(self, node: int, meeting: Rendezvous) -> None:
        """Nothing is listened to yet."""
        self.node = node
        self.names = meeting.agreement.names
        self.connections = meeting.connections
        self.told: set[bool] = set()
        """Which failures of ours the others know of: secondary ones, or a true one."""
        self.stopped = False
        self.leaving = False
        self.patience = 0.0

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

    def listen(self, inbox: EventQueue) -> None:
        """Turn what they say into events, from threads of their own."""
        for node, connection in self.connections.items():
            words = (node, connection, inbox)
            threading.Thread(target=self._hear, args=words, daemon=True).start()

    def tell_failure(self, text: str, exit_code: int, secondary: bool) -> None:
        """We end, and why; secondary: probably because of somebody else. Each is told once."""
        if secondary in self.told:
            return
        self.told |= {True, secondary}
        content = {"node": self.node, "text": text[:TEXT_LETTERS], "exit_code": exit_code}
        self._send("failed", {**content, "secondary": secondary})

    def tell_stop(self, signum: int) -> None:
        """Somebody wants the run to save and to end."""
        if not self.stopped:
            self.stopped = True
            self._send("stop", {"node": self.node, "signal": signum})

    def tell_patience(self, seconds: float) -> None:
        """For how long our ranks may stand still now; small changes are not worth a word."""
        if not 0.8 * self.patience <= seconds <= 1.25 * self.patience:
            self.patience = seconds
            self._send("patience", {"node": self.node, "seconds": seconds})

    def _send(self, kind: str, words: dict[str, Any]) -> None:
        self._pass_on({kind: words}, self.node)

    def _hear(self, node: int, connection: PeerConnection, inbox: EventQueue) -> None:
        """All that one connection says, until its end; node 0 hands it on to the others."""
        why = GONE
        try:
            while words := connection.receive():
                said: Words = shaped(words, Words)
                if said.done:
                    return
                for found in (said.failed, said.stop, said.patience):
                    if found is not None:
                        self._check(found.node, node)
                        self._take(found, inbox)
                if self.node == 0:
                    self._pass_on(words, node)
        except Misshapen:
            connection.close()
            why = NONSENSE
        if self.leaving:
            return
        lost = PeerFailure(node, why, HostLost.exit_code, secondary=False)
        self._take(lost, inbox)
        if self.node == 0:
            self._pass_on({"failed": asdict(lost)}, node)

    def _check(self, about: int, node: int) -> None:
        """Raise Misshapen for a node that is none, or that speaks for another; node 0 may."""
        if about >= len(self.names) or about == self.node or (node and about != node):
            raise Misshapen("speaks for another node")

    def _pass_on(self, words: dict[str, Any], origin: int) -> None:
        for node, connection in self.connections.items():
            if node != origin:
                connection.send(**words)

    def _take(self, said: PeerFailure | Stop | PeerPatienceTimer, inbox: EventQueue) -> None:
        name = self.names[said.node]
        match said:
            case PeerFailure():
                inbox.put(PeerFailed(**asdict(said), name=name))
            case Stop():
                self.stopped = True
                inbox.put(PeerStops(**asdict(said)))
            case PeerPatienceTimer():
                inbox.put(PeerPatience(**asdict(said)))
