"""Callers at node 0 before a run: authenticated and decoded before they are believed."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Annotated

from launcher.rendezvous.connection import Nonce, PeerConnection
from launcher.run.hosts import MOST_HOSTS, MOST_SLOTS
from rackrun.contract.variables import JOB_KEY
from rackrun.light_dataclass import dataclass
from rackrun.run_folder import RUN_NAME
from rackrun.shapes import Between, Matches, Misshapen, shaped

HELLO_SECONDS = 5.0  # from a connection to all of its first words; strangers may drip
REST_SECONDS = 0.1
MOST_STRANGERS = 512

Slots = Annotated[int, Between(1, MOST_SLOTS)]
NodeName = Annotated[str, Matches("[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")]
RunName = Annotated[str, Matches(f"({RUN_NAME})?")]


@dataclass(frozen=True)
class NodeInfo:
    """A node's description of itself."""

    node: Annotated[int, Between(0, MOST_HOSTS)]
    nodes: Annotated[int, Between(1, MOST_HOSTS)]
    processes: Slots
    name: NodeName
    job: Annotated[str, Matches("[!-~]{0,255}")]
    """The scheduler's name for the job: two jobs may meet at one port by mistake."""
    resume: RunName = ""
    """The newest run here that has a checkpoint to resume."""


@dataclass(frozen=True)
class NodeHello:
    """The first words of a node."""

    hello: NodeInfo
    nonce: Nonce


class PendingCallers:
    """Callers that have not identified themselves yet, read concurrently."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self.listener = listener
        self.key = key
        self.hint = ""
        self.waiting: dict[PeerConnection, float] = {}  # the oldest first
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> PendingCallers:
        return self

    def __exit__(self, *reason: object) -> None:
        self._leave(0)
        self.selector.close()

    def introduced(self, seconds: float) -> Iterator[tuple[PeerConnection, NodeInfo]]:
        """Yield, within that many seconds, each caller that sends a valid hello."""
        for ready, _ in self.selector.select(min(seconds, 1.0)):
            if ready.fileobj is self.listener:
                self._let_in()
            elif (connection := ready.data) in self.waiting and (member := self._hear(connection)):
                yield connection, member
        late = time.monotonic() - HELLO_SECONDS
        in_time = sum(since > late for since in self.waiting.values())
        self._leave(min(in_time, MOST_STRANGERS))

    def _let_in(self) -> None:
        try:
            stream, _ = self.listener.accept()
            stream.setblocking(False)
            connection = PeerConnection(stream, self.key)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._leave(len(self.waiting) // 2)
                time.sleep(REST_SECONDS)  # there may be no caller to close
            return
        connection.greet()
        self.waiting[connection] = time.monotonic()
        self.selector.register(stream, selectors.EVENT_READ, connection)

    def _hear(self, connection: PeerConnection) -> NodeInfo | None:
        """Return the hello of a caller once it is complete; close one that sends anything else."""
        try:
            whole = connection.hear()
            fields = connection.message()
            if fields is None:
                if not whole:
                    self._drop(connection)
                return None
            hello: NodeHello = shaped(fields, NodeHello)
        except (Misshapen, TimeoutError) as error:
            self._note(connection, str(error))
            self._drop(connection)
            return None
        self._forget(connection)
        connection.stream.setblocking(True)
        connection.theirs = hello.nonce
        return hello.hello

    def _note(self, connection: PeerConnection, error: str) -> None:
        """Remember, for the message to the user, a caller with another key or with none."""
        if JOB_KEY in error:
            with contextlib.suppress(OSError):
                who = plain_address(connection.stream.getpeername()[0])
                self.hint = f" ({who} has another {JOB_KEY})"

    def _leave(self, left: int) -> None:
        """Close the oldest connections until at most this many are left."""
        for connection in list(self.waiting)[: max(0, len(self.waiting) - left)]:
            self._drop(connection)

    def _drop(self, connection: PeerConnection) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: PeerConnection) -> None:
        del self.waiting[connection]
        self.selector.unregister(connection.stream)


def plain_address(address: str) -> str:
    """Return an IPv4 address that came over an IPv6 socket as IPv4."""
    return address.removeprefix("::ffff:")
