"""The ranks of this host as members of the groups of an elastic run.

    rank ──▶ agent ──▶ launcher     ready, formed, broken, left: one JSON object per packet
    rank ◀── agent ◀── launcher     a generation of the group, or the end

The launcher decides; the agent checks what ranks send, and passes on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import selectors
import socket

from launcher.remote.agent.descriptors import receive

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from launcher.remote.agent.frames import Launcher

ERROR_LETTERS = 4096
DIGEST_LETTERS = 128
LARGEST = 2**53
LAST_PORT = 65535


class RankSockets:
    """The socket that ranks call, and the rank of each connection."""

    def __init__(self, launcher: Launcher, first_rank: int, processes: int) -> None:
        """Take the ranks of this host: `processes` of them, from `first_rank` on."""
        self.launcher = launcher
        self.first_rank = first_rank
        self.processes = processes
        self.connections: dict[int, socket.socket] = {}  # by local rank, its newest one
        self._unnamed: set[socket.socket] = set()  # those whose ranks have sent nothing yet

    def open(self, selector: selectors.BaseSelector, path: str) -> None:
        """Listen for ranks at this path."""
        self.selector = selector
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(self.processes)
        self.listener.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def announce(self, generation: dict[str, Any]) -> None:
        """Send the members of a generation that run here what it is, each with its rank."""
        ranks = {member: rank for rank, member in enumerate(generation["members"])}
        for local in range(self.processes):
            rank = ranks.get(self.first_rank + local)
            if rank is not None:
                self._send(local, {**generation, "rank": rank, "world": len(ranks)})

    def end(self, reason: str, locals: Iterable[int] | None = None) -> None:
        """End the membership of ranks, by default of all: they belong to no group any more."""
        for local in [*(self.connections if locals is None else locals)]:
            self._send(local, {"end": reason})

    def close(self, local: int) -> None:
        """Pass on what a rank that has ended has sent; nothing of it comes later."""
        self._accept()
        for connection in {*self._unnamed, *self.connections.values()}:
            self._take(connection)
        if local in self.connections:
            self._close(self.connections[local])

    def _send(self, local: int, message: dict[str, Any]) -> None:
        """Send a rank a message; one that takes none is cut off, and ends itself."""
        connection = self.connections.get(local)
        if connection is not None:
            try:
                connection.send(json.dumps(message).encode())
            except OSError:
                self._close(connection)

    def _accept(self, descriptor: int = 0) -> None:
        """Watch new connections; a rank's first message has its number."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self.listener.accept()
                connection.setblocking(False)
                take = functools.partial(self._take, connection)
                self.selector.register(connection, selectors.EVENT_READ, take)
                self._unnamed.add(connection)

    def _take(self, connection: socket.socket, descriptor: int = 0) -> None:
        """Pass on a rank's messages; what is none is dropped."""
        data = receive(connection)
        while data:
            with contextlib.suppress(ValueError, RecursionError):
                local, event = event_in(data, self.processes)
                self.connections[local] = connection
                self._unnamed.discard(connection)
                self.launcher.send_event(local, **event)
            data = receive(connection)
        if data == b"":
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._unnamed.discard(connection)
        with contextlib.suppress(KeyError, ValueError):  # closed already
            self.selector.unregister(connection)
            connection.close()
        self.connections = {
            local: other for local, other in self.connections.items() if other is not connection
        }


def event_in(data: bytes, processes: int) -> tuple[int, dict[str, Any]]:
    """Return the local rank and the event in a message of a rank; ValueError for anything else."""
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("no object")
    local = _whole(message.get("local"), processes - 1)
    if "ready" in message:
        return local, {"event": "ready", "port": _whole(message["ready"], LAST_PORT)}
    name = next(name for name in ("formed", "broken", "left", "") if name in message or not name)
    event = {"event": name, "generation": _whole(message.get(name), LARGEST)}
    if name == "formed":
        digest = _text(message.get("digest"), DIGEST_LETTERS)
        event.update(step=_whole(message.get("step"), LARGEST), digest=digest)
    elif name == "broken":
        event.update(error=_text(message.get("error"), ERROR_LETTERS))
    return local, event


def _whole(value: object, most: int) -> int:
    """Return a whole number from 0 to `most`; ValueError for anything else."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("no such number")
    return value


def _text(value: object, most: int) -> str:
    """Return text, or its beginning; ValueError for anything else."""
    if type(value) is not str:
        raise ValueError("no text")
    return value[:most]
