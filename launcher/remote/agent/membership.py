"""The ranks of this host as members of the groups of an elastic run.

    rank ──▶ agent ──▶ launcher     ready, formed, broken, left: one JSON object per packet
    rank ◀── agent ◀── launcher     a generation of the group, or the end

The launcher decides; the agent checks what ranks send, and passes on.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from launcher.remote.agent.frames import Launcher
from launcher.remote.agent.nonblocking import LocalSocket

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
        self.socket = LocalSocket(self._take, self._lose)
        self.connections: dict[int, socket.socket] = {}  # by local rank, its newest one

    def announce(self, generation: dict[str, Any]) -> None:
        """Send the members of a generation that run here what it is, each with its rank."""
        ranks = {member: rank for rank, member in enumerate(generation["members"])}
        for local in range(self.processes):
            rank = ranks.get(self.first_rank + local)
            if rank is not None:
                self._send(local, {**generation, "rank": rank, "world": len(ranks)})

    def end(self, reason: str) -> None:
        """End the membership of all ranks: they belong to no group any more."""
        for local in [*self.connections]:
            self._send(local, {"end": reason})

    def close(self, local: int) -> None:
        """Pass on what a rank that has ended has sent; nothing of it comes later."""
        self.socket.accept()
        for connection in [*self.socket.connections]:
            self.socket.read(connection)
        if local in self.connections:
            self.socket.close(self.connections[local])

    def _send(self, local: int, message: dict[str, Any]) -> None:
        connection = self.connections.get(local)
        if connection is not None:
            try:
                connection.send(json.dumps(message).encode())
            except OSError:  # it reads nothing: cut off, it ends itself
                self.socket.close(connection)

    def _take(self, connection: socket.socket, data: bytes) -> None:
        # A rank is the user's program, and may send anything: what is not a message is dropped.
        with contextlib.suppress(ValueError, RecursionError):
            local, event = event_in(data, self.processes)
            self.connections[local] = connection
            self.launcher.send_event(local, **event)

    def _lose(self, connection: socket.socket) -> None:
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
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("no such number")
    return value


def _text(value: object, most: int) -> str:
    if type(value) is not str:
        raise ValueError("no text")
    return value[:most]
