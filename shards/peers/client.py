"""Ask other hosts for parts of shards, within time limits, and leave alone those that fail."""

import logging
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from rackrun.shapes import AtMost, Between, Matches
from rackrun.shards.peers.protocol import HAVE, NO, WAIT, Request, encoded

IDLE = 2  # connections of a process to one host that are kept for the next request
LONGEST_PAUSE = 3600.0  # seconds

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peer:
    """A host of the run, as it tells the others."""

    identity: Annotated[str, Matches("[0-9a-f]{64}")]
    """Of its cache: hosts with the same one share it."""
    address: Annotated[str, AtMost(64)]
    port: Annotated[int, Between(0, 65535)]
    """0: it serves no blocks."""


@dataclass(frozen=True)
class PeerTimeouts:
    """Limits on waiting for another host, in seconds."""

    connect_seconds: float = 1.0
    """For a connection."""
    answer_seconds: float = 10.0
    """For a sign of life, and then for all bytes of the answer."""
    fetch_seconds: float = 60.0
    """For a block that the host says it is fetching."""
    pause_seconds: float = 10.0
    """How long a host that has failed is left alone; doubled each time in a row, up to an hour."""


class PeerError(Exception):
    """A host does not answer, or not as the protocol has it."""


class PeerClient:
    """The connections of a process to the other hosts; any thread may use it."""

    def __init__(self, token: bytes, peers: Sequence[Peer], timeouts: PeerTimeouts) -> None:
        self._token = token
        self._peers = peers
        self._timeouts = timeouts
        self._idle: dict[tuple[int, int], deque[socket.socket]] = defaultdict(deque)
        """By process, as a child makes its own after a fork, and host."""
        self._failures: dict[int, int] = defaultdict(int)  # in a row
        self._warned = set[int]()
        self._left_until: dict[int, float] = {}

    def __del__(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()

    def ask(self, number: int, request: Request) -> memoryview | None:
        """Return the bytes that a host has; None if it has none, fails, or is left alone."""
        if not self._peers[number].port or self.leaves_alone(number):
            return None
        try:
            reply = self._exchange(number, request)
        except (OSError, PeerError) as error:
            if not self.leaves_alone(number):  # threads that fail at once count as one failure
                # Up to 20: that is beyond the longest pause, and the power does not overflow.
                pause = self._timeouts.pause_seconds * 2 ** min(self._failures[number], 20)
                self._failures[number] += 1
                self.leave_alone(number, str(getattr(error, "strerror", None) or error), pause)
            return None
        self._failures[number] = 0
        return reply

    def leaves_alone(self, number: int) -> bool:
        """Return True while a host is not asked, because it has failed."""
        return time.monotonic() < self._left_until.get(number, 0.0)

    def leave_alone(self, number: int, why: str, seconds: float = LONGEST_PAUSE) -> None:
        """Do not ask a host for a while; warn the first time."""
        self._left_until[number] = time.monotonic() + min(seconds, LONGEST_PAUSE)
        if number not in self._warned:
            self._warned.add(number)
            address = self._peers[number].address
            log.warning("%s: no help as a cache: %s; its blocks come from --data", address, why)

    def _exchange(self, number: int, request: Request) -> memoryview | None:
        """Return the answer, over a connection that is kept if the host still has it open."""
        data = encoded(self._token, request)
        while True:
            connection, is_new = self._connection(number)
            is_whole = False
            try:
                status = self._status(connection, data)
                if not status and not is_new:
                    continue  # the host has closed it meanwhile, to make room for others
                reply = self._received(connection, status, request.length)
                is_whole = True
                return reply
            finally:
                idle = self._idle[os.getpid(), number]
                if is_whole and len(idle) < IDLE:
                    idle.append(connection)
                else:
                    connection.close()

    def _connection(self, number: int) -> tuple[socket.socket, bool]:
        try:
            return self._idle[os.getpid(), number].pop(), False
        except IndexError:
            pass
        peer = self._peers[number]
        seconds = self._timeouts.connect_seconds
        connection = socket.create_connection((peer.address, peer.port), seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, True

    def _status(self, connection: socket.socket, data: bytes) -> bytes:
        """Send a request; return the first byte of the answer, or nothing if there is none."""
        connection.settimeout(self._timeouts.answer_seconds)
        try:
            connection.sendall(data)
            return connection.recv(1)
        except ConnectionError:
            return b""

    def _received(self, connection: socket.socket, status: bytes, length: int) -> memoryview | None:
        """Return the rest of an answer whose first byte is `status`; None if the host has none."""
        deadline = time.monotonic() + self._timeouts.fetch_seconds
        while status == WAIT:
            if time.monotonic() > deadline:
                raise PeerError("fetches a block for too long")
            status = connection.recv(1)
        if status == NO:
            return None
        if status != HAVE:
            raise PeerError("sends nonsense" if status else "closes the connection")
        return self._bytes(connection, length)

    def _bytes(self, connection: socket.socket, length: int) -> memoryview:
        """Return this number of bytes; PeerError if they do not come within `answer_seconds`."""
        deadline = time.monotonic() + self._timeouts.answer_seconds
        data = np.empty(length, np.uint8).data  # its memory is not wiped first
        room = data
        while room:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))  # 0 means not to block
            count = connection.recv_into(room)
            if not count:
                raise PeerError("breaks off an answer")
            room = room[count:]
        return data
