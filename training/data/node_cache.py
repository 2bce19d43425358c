"""The cache of this node, and with those of the other hosts one for the whole run.

    every rank: its host -> the first rank of each host: a server -> its address, to all ranks

Ranks exchange this at the start; no launcher is involved.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np

from rackrun.machine import boot_id
from rackrun.shapes import AtMost, Matches, parsed
from rackrun.shards.block_store import SPARE
from rackrun.shards.cache import Block, CachedSource
from rackrun.shards.index import Shard
from rackrun.shards.peers import server
from rackrun.shards.peers.client import Peer
from rackrun.shards.peers.protocol import TOKEN_BYTES
from rackrun.shards.peers.source import PeerSource, PeerTable
from rackrun.shards.source import Source
from rackrun.shards.traffic import ReadBytes
from rackrun.training.ranks import Ranks

MOST_MESSAGE_BYTES = 4096

_log = logging.getLogger(__name__)


class MissingBlock(NamedTuple):
    """A block that is to be stored."""

    source: CachedSource
    shard: Shard
    block: Block

    @property
    def is_here(self) -> bool:
        """Return True if it has been stored meanwhile."""
        return self.source.store.has(self.block.key(self.shard), self.block.bytes)

    def fetch(self) -> int:
        """Store the block; return its bytes."""
        self.source.obtain(self.shard, self.block, slice(0))
        return self.block.bytes


Message = TypeVar("Message", "Route", "Peer")


@dataclass(frozen=True)
class Route:
    """How a rank sees its host and the first one."""

    host: Annotated[str, Matches("[0-9a-f]{64}")]
    """Equal for the ranks that share a cache."""
    address: Annotated[str, AtMost(64)]
    """From which it reaches the first host."""
    master: Annotated[str, AtMost(64)]
    """At which it reaches the first host; empty: not known."""


class NodeCache:
    """What the sources of a run keep on this node; without --cache, nothing."""

    def __init__(self, sources: Sequence[Source], splits: Collection[str]) -> None:
        """Take the sources, and the splits that the run reads."""
        self._sources = [source for source in sources if isinstance(source, CachedSource)]
        self._splits = splits
        self._server: subprocess.Popen[bytes] | None = None

    def report_fields(self) -> dict[str, Any]:
        """Return what this rank reports of its reading so far: nothing where nothing is cached.

        The first rank of a host also counts what was fetched for other hosts.
        """
        if not self._sources:
            return {}
        total = ReadBytes()
        for source in self._sources:
            total = total.plus(source.traffic.total())
        return {
            "cache_bytes": total.cache,
            "peer_bytes": total.peers,
            "origin_bytes": total.origin,
        }

    def missing(self, part: int, parts: int) -> list[MissingBlock]:
        """Return every `parts`-th block, from number `part` on, that this host is yet to store."""
        # All sources store into one folder, which has one limit.
        room = sum(source.store.limit_bytes for source in self._sources[:1]) * (1 - SPARE)
        blocks = []
        for source in self._sources:
            splits = [split for split in source.manifest.splits if split.name in self._splits]
            for shard in chain.from_iterable(split.shards for split in splits):
                for block in source.blocks_of(shard):
                    if source.keeps(shard, block) and (room := room - block.bytes) > 0:
                        blocks.append(MissingBlock(source, shard, block))
        return [block for block in blocks[part::parts] if not block.is_here]

    def meet(self, ranks: Ranks) -> None:
        """Start this host's server, and have the sources ask those of the others, if there are."""
        sources = [source for source in self._sources if isinstance(source, PeerSource)]
        if not sources or not ranks.connected:
            return
        # Ranks of a host share its cache, which the first of them serves to other hosts.
        routes = _exchanged(ranks, Route, _route(sources[0].folder))
        hosts = list(dict.fromkeys(route.host for route in routes.values()))
        if len(hosts) == 1:
            return
        first_ranks = {route.host: rank for rank, route in reversed(routes.items())}
        this_host = first_ranks[routes[ranks.rank].host]
        token = ranks.broadcast_bytes(secrets.token_bytes(TOKEN_BYTES) if ranks.first else None)
        ours = self._serve(_address(ranks, routes), token) if ranks.rank == this_host else None
        peers = _exchanged(ranks, Peer, ours)
        table = PeerTable(token, tuple(peers.values()), peers[this_host].identity)
        sizes = [
            sum(shard.bytes for split in source.manifest.splits for shard in split.shards)
            for source in sources
        ]
        for source, size in zip(sources, sizes, strict=True):
            source.join(table, share=size / max(sum(sizes), 1))

    def close(self) -> None:
        """End the server; it would also end with this process."""
        if self._server:
            self._server.kill()
            self._server.wait()
            self._server = None

    def _serve(self, address: str, token: bytes) -> Peer:
        port = 0  # stays if the server cannot start: this host then only asks others
        try:
            self._server, port = server.started(address, token, self._sources, self._splits)
        except OSError as error:
            why = error.strerror or error
            _log.warning("%s: serves no blocks to other hosts: %s", address, why)
        folder = Path(self._sources[0].folder).resolve()
        identity = hashlib.sha256(f"{address} {os.getuid()} {folder}".encode()).hexdigest()
        return Peer(identity, address, port)


def _exchanged(ranks: Ranks, shape: type[Message], message: Message | None) -> dict[int, Message]:
    # By rank, the messages of those that have one.
    text = json.dumps(asdict(message)).encode() if message else b""
    gathered = ranks.all_gather(np.frombuffer(text, np.uint8))
    return {
        rank: parsed(numbers.tobytes(), shape, MOST_MESSAGE_BYTES)
        for rank, numbers in enumerate(gathered)
        if numbers.size
    }


def _route(folder: str) -> Route:
    name = f"{socket.gethostname()} {boot_id()} {Path(folder).resolve()}"
    host = hashlib.sha256(name.encode()).hexdigest()
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with contextlib.suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(
            master, int(os.environ.get("MASTER_PORT", "9")), type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind) as sock:
                sock.connect(target)  # of a datagram socket: sends nothing, only finds the route
                return Route(host, sock.getsockname()[0], sock.getpeername()[0])
    return Route(host, "127.0.0.1", "")


def _address(ranks: Ranks, routes: dict[int, Route]) -> str:
    this_route = routes[ranks.rank]
    # The first host reaches itself at an address that other hosts may not be able to reach.
    if this_route.host == routes[0].host:
        others = (route.master for route in routes.values() if route.host != this_route.host)
        return next(filter(None, others), this_route.address)
    return this_route.address
