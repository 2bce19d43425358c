"""Serve blocks of a host's cache to the other hosts of a run: a process of the host's first rank.

    a thread for each connection    reads requests, and sends parts of blocks from their files
    fetchers                        threads that first verify a block, or fetch and store it

A thousand threads that wait take 20 MB. One loop for all connections, which hands requests to
threads, needs a quarter more CPU time for an answer of 110 KB.

The process gets a listening socket, and its order as JSON on standard input. It ends with the rank,
even by SIGKILL; it leaves weaker signals to the rank.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, NamedTuple, NoReturn

from rackrun.errors import Problem
from rackrun.shapes import Matches, parsed
from rackrun.shards.cache import ALL, Block, CachedSource
from rackrun.shards.index import Shard
from rackrun.shards.open import open_source
from rackrun.shards.peers.protocol import (
    HAVE,
    NO,
    REQUEST_BYTES,
    TOKEN_BYTES,
    WAIT,
    Request,
    decoded,
)
from rackrun.shards.source import Stored
from rackrun.shards.traffic import Traffic
from rackrun.signals import end_with

MOST_CONNECTIONS = 1024  # with one more, the one unused for longest is closed
FETCHES = 8  # at once
START_SECONDS = 60.0  # for the process
FIRST_SECONDS = 5.0  # for the first request of a connection
SEND_SECONDS = 10.0  # for an answer
BEAT_SECONDS = 0.5  # between two signs of life
REST_SECONDS = 0.02  # after a connection that could not be accepted
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


class PeerServer:
    """Answers requests for parts of the shards of some sources."""

    def __init__(
        self, listener: socket.socket, token: bytes, sources: Sequence[CachedSource]
    ) -> None:
        self._listener = listener
        self._token = token
        self._sources = sources
        self._lock = threading.Lock()  # of the next two
        self._connections = 0
        self._idle: dict[socket.socket, None] = {}  # the one unused for longest first
        self._verified = set[str]()  # the keys of blocks that this process has verified
        self._fetchers = ThreadPoolExecutor(FETCHES)
        self._fetches = threading.Semaphore(FETCHES)

    def serve(self) -> NoReturn:
        """Serve until the process ends."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the client has closed it meanwhile, or no descriptor is free:
                time.sleep(REST_SECONDS)  # then the next call would fail at once, too
                continue
            if not self._has_room():
                connection.close()
                continue
            try:
                threading.Thread(target=self._converse, args=[connection], daemon=True).start()
            except RuntimeError:  # the system lets this process have no more threads
                self._end(connection)

    def _has_room(self) -> bool:
        """Count a new connection; with too many, end the one that was unused for longest."""
        with self._lock:
            if self._connections >= MOST_CONNECTIONS:
                oldest = next(iter(self._idle), None)
                if oldest is None:
                    return False
                del self._idle[oldest]
                # Its thread wakes up and closes it. A host of the run connects again when it asks.
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._connections += 1
        return True

    def _end(self, connection: socket.socket) -> None:
        connection.close()
        with self._lock:
            self._connections -= 1

    def _converse(self, connection: socket.socket) -> None:
        """Answer one request after the other, until the host hangs up or sends anything else."""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = self._next_request(connection, FIRST_SECONDS)
            while request:
                connection.settimeout(SEND_SECONDS)
                self._answer(connection, request)
                # A host that has shown the token may keep its connection for later.
                request = self._next_request(connection, None)
        except OSError:
            pass  # it has hung up, or takes too long
        finally:
            self._end(connection)

    def _next_request(self, connection: socket.socket, seconds: float | None) -> Request | None:
        """Return the next request; None if the connection ends, or lacks this run's token."""
        with self._lock:
            self._idle[connection] = None
        try:
            connection.settimeout(seconds)
            deadline = time.monotonic() + (seconds or 0.0)
            data = connection.recv(REQUEST_BYTES)
            while data and (missing := REQUEST_BYTES - len(data)):
                if seconds:  # in all, however few bytes come at a time
                    connection.settimeout(max(deadline - time.monotonic(), 0.001))
                part = connection.recv(missing)
                data = part and data + part
        finally:
            with self._lock:
                self._idle.pop(connection, None)
        return decoded(self._token, data) if data else None

    def _answer(self, connection: socket.socket, request: Request) -> None:
        """Answer a request; where its block is not known to be right, after verifying it."""
        part = self._part(request)
        if part is None:
            connection.sendall(NO)
            return
        if self._is_verified(part) and not request.verify:
            _send_block(connection, part)
            return
        # WAIT shows the host that asks that this one is alive.
        while not self._fetches.acquire(timeout=BEAT_SECONDS):
            connection.sendall(WAIT)
        try:  # held until the block is sent, which limits how many are in memory
            fetching = self._fetchers.submit(self._obtain, part)
            while not wait([fetching], BEAT_SECONDS).done:
                connection.sendall(WAIT)
            data = fetching.result()
            if data:
                _send_block(connection, part, data)
            else:
                connection.sendall(NO)
        finally:
            self._fetches.release()

    def _is_verified(self, part: BlockPart) -> bool:
        key = part.block.key(part.shard)
        return key in self._verified and part.source.store.has(key, part.block.bytes)

    def _part(self, request: Request) -> BlockPart | None:
        """Return what a request asks for; None unless it is within one block of a known shard."""
        with contextlib.suppress(Problem, KeyError):  # an index that cannot be read
            source, shard = self._shards[request.sha256]
            for block, span in source.parts_of(shard, request.offset, request.length):
                first = block.start + span.start
                if (first, span.stop - span.start) == (request.offset, request.length):
                    return BlockPart(source, shard, block, span)
        return None

    @cached_property
    def _shards(self) -> dict[str, tuple[CachedSource, Shard]]:
        """By digest: each shard that is served, with a source of it."""
        return {
            shard.sha256: (source, shard)
            for source in self._sources
            for split in source.manifest.splits
            for shard in split.shards
        }

    def _obtain(self, part: BlockPart) -> Stored:
        """Return a whole block, verified and stored; empty if no correct one can be had.

        Wrong bytes are not sent on: their reader would blame this host.
        """
        source, shard, block, _ = part
        with contextlib.suppress(Problem):
            data = source.obtain(shard, block, ALL)
            if source.is_right(shard, block, data):
                self._verified.add(block.key(shard))
                return data
        return b""


def _send_block(stream: socket.socket, part: BlockPart, data: Stored = b"") -> None:
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
                [sys.executable, "-m", "rackrun.shards.peers.server"],
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
    # Each connection needs its socket and, while it is answered, the file of a block.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 3 * MOST_CONNECTIONS)), hard))
    listener = socket.socket(fileno=order.listener)
    sources = [opened(served) for served in order.sources]
    os.write(1, b"\n")
    PeerServer(listener, bytes.fromhex(order.token), sources).serve()


if __name__ == "__main__":
    main()
