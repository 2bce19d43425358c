"""The other nodes of a run that was started node by node: how they end, and how we do.

Every node has its own launcher, which sees its own ranks only. Over the connections of the roll
call each one tells the others of its first failure, of a wish to stop, and for how long its ranks
may stand still; node 0 passes it on. So all nodes end together, with one cause and one exit code.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from launcher.errors import HostLost
from launcher.events import PeerFailed, PeerPatience, PeerStops
from launcher.link import Inbox
from launcher.rollcall import Connection, Meeting


class Peers:
    """Everybody else, as a context: leaving it is a good end, whatever the run was."""

    def __init__(self, node: int, meeting: Meeting) -> None:
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

    def listen(self, inbox: Inbox) -> None:
        """Turn what they say into events, from threads of their own."""
        for node, connection in self.connections.items():
            words = (node, connection, inbox)
            threading.Thread(target=self._hear, args=words, daemon=True).start()

    def tell_failure(self, text: str, exit_code: int, secondary: bool) -> None:
        """We end, and why; secondary: probably because of somebody else. Each is told once."""
        if secondary in self.told:
            return
        self.told |= {True, secondary}
        content = {"node": self.node, "text": text, "exit_code": exit_code}
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

    def _send(self, kind: str, words: dict[str, Any], but: int = -1) -> None:
        for node, connection in self.connections.items():
            if node != but:
                connection.send(**{kind: words})

    def _hear(self, node: int, connection: Connection, inbox: Inbox) -> None:
        """All that one connection says, until its end; node 0 hands it on to the others."""
        while words := connection.receive():
            if "done" in words:
                return
            for kind, content in words.items():
                self._take(kind, content, inbox)
                if self.node == 0:
                    self._send(kind, content, but=node)
        if self.leaving:
            return
        lost = {"node": node, "text": "its launcher is gone", "exit_code": HostLost.exit_code}
        content = {**lost, "secondary": False}
        self._take("failed", content, inbox)
        if self.node == 0:
            self._send("failed", content, but=node)

    def _take(self, kind: str, content: dict[str, Any], inbox: Inbox) -> None:
        if kind == "failed":
            inbox.put(PeerFailed(**{**content, "name": self.names[content["node"]]}))
        elif kind == "stop":
            self.stopped = True
            inbox.put(PeerStops(**content))
        elif kind == "patience":
            inbox.put(PeerPatience(**content))
