"""Serve blocks of a host's cache to the other hosts of a run: a process of the host's first rank.

    the loop     accepts, collects requests, drops strangers; sends WAIT while a block is fetched
    answerers    threads that send parts of blocks from their files
    fetchers     threads that first verify a block, or fetch and store it

The process gets a listening socket, and its order as JSON on standard input. It ends with the rank,
even by SIGKILL; it leaves weaker signals to the rank.
"""

import contextlib
import json
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Annotated, NamedTuple, NoReturn

from rackrun.errors import Problem
from rackrun.shapes import Matches, parsed
from rackrun.signals import end_with
from shards.cache import ALL, Block, CachedSource
from shards.index import Shard
from shards.open import open_source
from shards.peers.protocol import HAVE, NO, REQUEST_BYTES, TOKEN_BYTES, WAIT, Request, decoded
from shards.source import Stored
from shards.traffic import Traffic

MOST_CONNECTIONS = 1024  # with one more, the one unused for longest is closed
MOST_BYTES = 16 << 20  # of an answer
ANSWERERS = FETCHERS = 8  # as many answers are in memory at once
START_SECONDS = 60.0  # for the process
FIRST_SECONDS = 5.0  # for the first request of a connection
SEND_SECONDS = 10.0  # for an answer
BEAT_SECONDS = 0.5  # between two signs of life
MOST_ORDER_BYTES = 1 << 20
ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


class BlockPart(NamedTuple):
    """A part of a block."""

    source: CachedSource
    shard: Shard
    block: Block
    span: slice


@dataclass(frozen=True)
class ServedSource:
    """A source to open in the server's process."""

    location: str
    cache: str
    limit_bytes: int
    counters: tuple[int, ...]
    """Descriptors of its Traffic."""
    loans: dict[str, tuple[int, int, int, int]]
    """By split: where the index can be mapped."""


@dataclass(frozen=True)
class ServerOrder:
    """What a server is started with."""

    parent: int
    listener: int
    """The descriptor of a listening socket."""
    token: Annotated[str, Matches(f"[0-9a-f]{{{2 * TOKEN_BYTES}}}")]
    sources: tuple[ServedSource, ...]


@dataclass(eq=False)
class RequestConnection:
    """A connection of another host."""

    socket: socket.socket
    since: float = 0.0
    """When it began to wait for a request."""
    is_known: bool = False
    """Whether it has sent a request of this run."""
    received: bytes = b""


class PeerServer:
    """Answers requests for parts of the shards of some sources."""

    def __init__(
        self, listener: socket.socket, token: bytes, sources: Sequence[CachedSource]
    ) -> None:
        self._listener = listener
        self._token = token
        self._sources = sources
        self._selector = selectors.DefaultSelector()
        self._idle: dict[socket.socket, RequestConnection] = {}  # the one unused for longest first
        self._busy = 0
        self._waiting = set[RequestConnection]()  # for a fetch
        self._lock = threading.Lock()  # of `_waiting`: no sign of life may get among the bytes
        self._sound = set[str]()  # the keys of blocks that were verified here
        self._answered = deque[RequestConnection]()
        self._woken, self._waker = socket.socketpair()
        self._answerers = ThreadPoolExecutor(ANSWERERS)
        self._fetchers = ThreadPoolExecutor(FETCHERS)

    def serve(self) -> NoReturn:
        """Serve until the process ends."""
        for waited_for in (self._listener, self._woken, self._waker):
            waited_for.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._take_back)
        next_beat = 0.0
        while True:
            for key, _ in self._selector.select(BEAT_SECONDS):
                key.data()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_SECONDS
                self._beat()
                self._drop_strangers()

    def _accept(self) -> None:
        """Accept a connection, at the cost of the one that was unused for longest."""
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # it has been closed meanwhile
            return
        if len(self._idle) + self._busy >= MOST_CONNECTIONS:
            if not self._idle:
                accepted.close()
                return
            self._drop(next(iter(self._idle.values())))
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait_for_request(RequestConnection(accepted))

    def _wait_for_request(self, connection: RequestConnection) -> None:
        connection.socket.setblocking(False)
        connection.since = time.monotonic()
        self._idle[connection.socket] = connection
        self._selector.register(
            connection.socket, selectors.EVENT_READ, partial(self._receive, connection)
        )

    def _drop(self, connection: RequestConnection) -> None:
        """Close a connection that waits for a request."""
        del self._idle[connection.socket]
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _drop_strangers(self) -> None:
        """Close connections that have sent no request in time."""
        for connection in list(self._idle.values()):
            silent = time.monotonic() - connection.since > FIRST_SECONDS
            if silent and not connection.is_known:
                self._drop(connection)

    def _receive(self, connection: RequestConnection) -> None:
        """Take what has come of a request; hand on a whole one, and drop all else."""
        if connection.socket not in self._idle:
            return  # closed for another one, in this turn
        try:
            data = connection.socket.recv(REQUEST_BYTES - len(connection.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.received += data
        if not data:
            self._drop(connection)
        elif len(connection.received) == REQUEST_BYTES:
            request = decoded(self._token, connection.received)
            if request is None:
                self._drop(connection)
                return
            connection.is_known, connection.received = True, b""
            del self._idle[connection.socket]
            self._selector.unregister(connection.socket)
            self._busy += 1
            self._answerers.submit(self._respond, connection, request)

    def _take_back(self) -> None:
        """Wait again for requests over the connections that were answered."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._answered:
            connection = self._answered.popleft()
            self._busy -= 1
            if connection.socket.fileno() >= 0:
                self._wait_for_request(connection)

    def _beat(self) -> None:
        """Show those who wait for a fetch that this host is alive."""
        with self._lock:
            for connection in self._waiting:
                with contextlib.suppress(OSError):  # if it is gone, sending the bytes fails
                    connection.socket.send(WAIT)

    def _respond(self, connection: RequestConnection, request: Request) -> None:
        """Answer a request from the cache; leave it to a fetcher if the block is not there."""
        part = self._part(request)
        if part is None:
            self._send(connection, None)
        elif request.verify or not self._is_sound(part):
            with self._lock:
                self._waiting.add(connection)
            self._fetchers.submit(self._fetch, connection, part)
        else:
            self._send(connection, part)

    def _is_sound(self, part: BlockPart) -> bool:
        """Return whether a block is here, and has been verified by this process."""
        key = part.block.key(part.shard)
        return key in self._sound and part.source.store.has(key, part.block.bytes)

    def _part(self, request: Request) -> BlockPart | None:
        """Return what a request asks for; None unless it is within one block of a known shard."""
        if not 0 < request.length <= MOST_BYTES:
            return None
        with contextlib.suppress(Problem, KeyError):  # an index that cannot be read
            source, shard = self._shards[request.sha256]
            for block, span in source.parts_of(shard, request.offset, request.length):
                first = block.start + span.start
                if (first, span.stop - span.start) == (request.offset, request.length):
                    return BlockPart(source, shard, block, span)
        return None

    @cached_property
    def _shards(self) -> dict[str, tuple[CachedSource, Shard]]:
        """The shards that are served, each with a source of it, by digest."""
        return {
            shard.sha256: (source, shard)
            for source in self._sources
            for split in source.manifest.splits
            for shard in split.shards
        }

    def _fetch(self, connection: RequestConnection, part: BlockPart) -> None:
        """Verify a block, which is fetched and stored if need be, and answer with a part of it."""
        source, shard, block, _ = part
        is_right = False
        with contextlib.suppress(Problem):
            data = source.obtain(shard, block, ALL)
            is_right = source.is_right(shard, block, data)  # else readers would blame this host
        if is_right:
            self._sound.add(block.key(shard))
        with self._lock:
            self._waiting.discard(connection)
        self._send(connection, part if is_right else None, data if is_right else b"")

    def _send(
        self, connection: RequestConnection, part: BlockPart | None, data: Stored = b""
    ) -> None:
        """Send a part of a block from its file, or of `data`; hand the connection back.

        It is closed if that takes too long.
        """
        try:
            connection.socket.settimeout(SEND_SECONDS)
            if part is None:
                connection.socket.sendall(NO)
            else:
                _send_block(connection.socket, part, data)
        except OSError:
            connection.socket.close()
        self._answered.append(connection)
        with contextlib.suppress(BlockingIOError):  # it will wake up anyway
            self._waker.send(b"\0")


def _send_block(stream: socket.socket, part: BlockPart, data: Stored) -> None:
    """Send a part of a block, without a copy if the file is still there; OSError if not in time."""
    source, shard, block, span = part
    with source.store.opened(block.key(shard), block.bytes) as opened:
        if opened is None and not data:  # removed meanwhile, for lack of room
            stream.sendall(NO)
            return
        stream.sendall(HAVE, socket.MSG_MORE)
        if opened is None:
            stream.sendall(memoryview(data)[span])
            return
        file, first = opened
        deadline = time.monotonic() + SEND_SECONDS
        offset, end = first + span.start, first + span.stop
        writable = select.poll()
        writable.register(stream, select.POLLOUT)
        while offset < end:
            try:
                sent = os.sendfile(stream.fileno(), file, offset, end - offset)
            except BlockingIOError:
                seconds = deadline - time.monotonic()
                if seconds < 0 or not writable.poll(1000 * seconds):
                    raise TimeoutError from None
                continue
            if not sent:
                raise OSError("the file has become shorter")
            offset += sent


def started(
    address: str, token: bytes, sources: Sequence[CachedSource], splits: Collection[str]
) -> tuple["subprocess.Popen[bytes]", int]:
    """Start a server of these sources; return the process and its port; OSError if that fails.

    It maps the indexes of `splits` from this process, and ends with it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=128) as listener:
        order = ServerOrder(
            os.getpid(),
            listener.fileno(),
            token.hex(),
            tuple(_served(source, splits) for source in sources),
        )
        counters = (counter for source in order.sources for counter in source.counters)
        # The run decides when it ends, not a signal that reaches all processes of a terminal.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "shards.peers.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(listener.fileno(), *counters),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert process.stdin and process.stdout
        with process.stdin as stdin:
            stdin.write(json.dumps(asdict(order)).encode())
        with process.stdout as stdout:  # a reader would take one that still starts for a dead one
            if not select.select([stdout], [], [], START_SECONDS)[0] or not stdout.read(1):
                process.kill()
                raise OSError("its cache server did not start")
        return process, int(listener.getsockname()[1])


def _served(source: CachedSource, splits: Collection[str]) -> ServedSource:
    loans = {
        split.name: source.lend_index(split.name)
        for split in source.manifest.splits
        if split.name in splits
    }
    limit, counters = source.store.limit_bytes, source.traffic.descriptors
    return ServedSource(source.source.location, source.folder, limit, counters, loans)


def opened(served: ServedSource) -> CachedSource:
    """Return the source, with the indexes of the process that has lent them."""
    source = CachedSource(open_source(served.location), served.cache, served.limit_bytes)
    source.traffic = Traffic(served.counters)
    for split, loan in served.loans.items():
        source.borrow_index(split, loan)
    return source


def main() -> NoReturn:
    """Serve what the order on standard input names."""
    order = parsed(sys.stdin.buffer.read(MOST_ORDER_BYTES + 1), ServerOrder, MOST_ORDER_BYTES)
    end_with(order.parent)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * MOST_CONNECTIONS)), hard))
    listener = socket.socket(fileno=order.listener)
    sources = [opened(served) for served in order.sources]
    os.write(1, b"\n")
    PeerServer(listener, bytes.fromhex(order.token), sources).serve()


if __name__ == "__main__":
    main()
