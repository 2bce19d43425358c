"""Measure what serving costs: nginx beside the limit of the machine, and readers in turn.

    python -m bench.serve [--rounds 3] [--image IMAGE]

The limit is a plain socket copy over loopback: a process that sends the same memory forever. The
same client reads from all servers and discards the bytes. Server and client share the cores, as on
no head node; the ratios count.
"""

import http.server
import multiprocessing
import os
import random
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from bench.turns import in_turn
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from rackrun.shards.index import (
    Manifest,
    Row,
    Split,
    index_name,
    pack_rows,
    serialise_index,
    shard_name,
)
from rackrun.shards.open import open_source
from rackrun.shards.samples import portions, samples
from rackrun.shards.writer import write_shard

FORK = multiprocessing.get_context("fork")
CLIENTS = (1, 8, 64)
RANGE_BYTES = 2 << 20
RECEIVE_BYTES = 256 << 10
SEND_BYTES = 2 << 20


@dataclass(frozen=True)
class Settings:
    """Rates of serving and costs of reading shards."""

    shards: int = 4
    """Shards of 500 images of about 110 KB."""
    seconds: float = 2.0
    """For each measurement of a server."""
    rounds: int = 3
    """Measurements of each kind, one kind after the other; the medians count."""
    image: str = ""
    """Also measure nginx in a container of this image."""


def main(args: list[str]) -> None:
    """Measure and print."""
    settings = parse(Settings, "python -m bench.serve", args)
    with tempfile.TemporaryDirectory(prefix="rackrun-bench-") as top:
        Path(top).chmod(0o755)
        folder = write_shards(Path(top) / "shards", settings.shards)
        print_rates(folder, settings)
        print_costs(folder, settings)


def write_shards(folder: Path, count: int) -> Path:
    """Write a shard folder of incompressible images."""
    dice = random.Random(0)
    folder.mkdir()
    rows, shards = [], []
    for number in range(count):
        with write_shard(folder / shard_name("bench", "train", number)) as writer:
            for image_number in range(500):
                image = dice.randbytes(dice.randrange(60_000, 160_000))
                offset, length, start = writer.add(f"p{number}_{image_number}", 0, image)
                size = len(image)
                rows.append(Row(number, offset, length, start, size, 0, 1, 1, crc32(image), b"jpg"))
            shards.append(writer.close())
    index = serialise_index(pack_rows(rows))
    name = index_name("bench", "train")
    (folder / name).write_bytes(index)
    split = Split("train", len(rows), name, sha256(index).hexdigest(), tuple(shards))
    (folder / "dataset.json").write_bytes(Manifest("bench", ("thing",), (split,)).serialise())
    return folder


class Contestant(NamedTuple):
    """A server, and whether it is asked for ranges or for whole shards."""

    serve: Callable[[], AbstractContextManager[int]]  # gives its port
    range_bytes: int


def print_rates(folder: Path, settings: Settings) -> None:
    """Print MB/s of every server for every number of clients, and its share of the limit."""

    def rates(contestant: Contestant) -> list[float]:
        with contestant.serve() as port:
            walk = requests(folder, contestant.range_bytes)
            return [rate(port, walk, clients, settings.seconds) for clients in CLIENTS]

    servers = contestants(folder, settings.image)
    ways = {name: partial(rates, contestant) for name, contestant in servers.items()}
    medians = {
        name: [statistics.median(column) for column in zip(*rounds, strict=True)]
        for name, rounds in in_turn(settings.rounds, ways).items()
    }
    print(f"{'MB/s, share of the limit':36}" + "".join(f"{n:>8} clients" for n in CLIENTS))
    for name, measured in medians.items():
        limits = next(iter(medians.values()))
        cells = (f"{r:,.0f} {r / most:.2f}" for r, most in zip(measured, limits, strict=True))
        print(f"{name:36}" + "".join(f"{cell:>16}" for cell in cells))


def contestants(folder: Path, image: str) -> dict[str, Contestant]:
    """Return the contestants by name, the limit first."""
    native = partial(nginx, Site(folder, port=0, native=True))
    servers = {
        "plain socket copy: the limit": Contestant(plain_copy, 0),
        "nginx, whole shards": Contestant(native, 0),
        "nginx, ranges of 2 MiB": Contestant(native, RANGE_BYTES),
        "Python's http.server, whole shards": Contestant(partial(python_server, folder), 0),
    }
    if image:
        contained = partial(nginx, Site(folder, port=0, image=image))
        servers["nginx in a container, whole shards"] = Contestant(contained, 0)
        servers["nginx in a container, 2 MiB"] = Contestant(contained, RANGE_BYTES)
    return servers


@contextmanager
def nginx(site: Site) -> Iterator[int]:
    """Serve by nginx as the project runs it."""
    with serving(site) as server:
        yield server.site.port


@contextmanager
def plain_copy() -> Iterator[int]:
    """Send the same memory to every client."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=128) as listener,
        another_process(pour, listener),
    ):
        yield listener.getsockname()[1]


def pour(listener: socket.socket) -> None:
    """Send an endless answer to every connection."""
    data = memoryview(bytes(SEND_BYTES))
    selector = selectors.EpollSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is listener:
                connection, _ = listener.accept()
                connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 60))
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_WRITE)
                continue
            try:
                connection.send(data)
            except OSError:
                selector.unregister(connection)
                connection.close()


class Handler(http.server.SimpleHTTPRequestHandler):
    """Python's own server, with connections that last."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Print nothing."""


class QuietServer(http.server.ThreadingHTTPServer):
    """A thread for each connection."""

    def handle_error(self, *args: object) -> None:
        """Print nothing: clients leave in the middle."""


@contextmanager
def python_server(folder: Path) -> Iterator[int]:
    """Serve the folder by Python's own server."""
    handler = partial(Handler, directory=str(folder))
    with (
        QuietServer(("127.0.0.1", 0), handler) as server,
        another_process(server.serve_forever),
    ):
        yield server.server_address[1]


@contextmanager
def another_process(work: Callable[..., None], *work_args: object) -> Iterator[None]:
    """Run something in a process of its own for as long as the block lasts."""
    process = FORK.Process(target=work, args=work_args, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def requests(folder: Path, range_bytes: int) -> Iterator[bytes]:
    """Yield requests without end: from any shard, at any place in it."""
    dice = random.Random()
    paths = {f"/{path.name}": path.stat().st_size for path in folder.glob("*.tar")}
    while True:
        path = dice.choice(sorted(paths))
        lines = [f"GET {path} HTTP/1.1", "Host: localhost"]
        if range_bytes:
            start = dice.randrange(paths[path] - range_bytes)
            lines.append(f"Range: bytes={start}-{start + range_bytes - 1}")
        yield "\r\n".join([*lines, "", ""]).encode()


@dataclass
class Client:
    """A connection that asks for more as soon as it has what it asked for."""

    connection: socket.socket
    walk: Iterator[bytes]
    left: int = 0  # bytes of the body that are still to come

    def receive(self, buffer: bytearray) -> int:
        """Receive what is there; return the number of bytes."""
        count = self.connection.recv_into(buffer)
        if not self.left:
            head, _, body = bytes(buffer[:count]).partition(b"\r\n\r\n")
            self.left = int(head.lower().partition(b"content-length: ")[2].split()[0])
            self.left -= len(body)
        else:
            self.left -= count
        if not self.left:
            self.connection.sendall(next(self.walk))
        return count


def rate(port: int, walk: Iterator[bytes], clients: int, seconds: float) -> float:
    """Return the MB/s that one process receives over that many connections."""
    buffer = bytearray(RECEIVE_BYTES)
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.EpollSelector())
        for _ in range(clients):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(next(walk))
            selector.register(connection, selectors.EVENT_READ, Client(connection, walk))
        taken, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            taken += sum(key.data.receive(buffer) for key, _ in selector.select())
        return taken / (time.perf_counter() - begun) / 1e6


def print_costs(folder: Path, settings: Settings) -> None:
    """Print the client's CPU seconds for 1,000 samples: key, label and the bytes of the image."""
    readers = [stock_webdataset, rackrun_as_training_reads, rackrun_with_digests]

    def in_a_fork(reader: Callable[[str], int]) -> float:
        with FORK.Pool(1) as pool:
            return pool.apply(cost, (reader, server.url))

    with serving(Site(folder, port=0, native=True)) as server:
        ways = {reader.__name__: partial(in_a_fork, reader) for reader in readers}
        costs = in_turn(settings.rounds, ways)
    print(f"{'CPU seconds for 1,000 samples':36}{'':>16}{'of webdataset':>16}")
    stock = statistics.median(costs[stock_webdataset.__name__])
    for name, seconds in costs.items():
        cpu = statistics.median(seconds)
        print(f"{name.replace('_', ' '):36}{cpu:>16.3f}{cpu / stock:>16.2f}")


def cost(reader: Callable[[str], int], url: str) -> float:
    """Return the CPU seconds for 1,000 samples, of this process and its children."""
    reader(url)  # what is only done once
    before = sum(os.times()[:4])
    count = reader(url)
    return (sum(os.times()[:4]) - before) / count * 1000


def rackrun_as_training_reads(url: str) -> int:
    """Read every sample, checked against the index, by ranges of 2 MiB."""
    source = opened(url)
    rows, shards = source.index("train"), source.manifest.split("train").shards
    borders = np.flatnonzero(np.diff(rows["offset"] // RANGE_BYTES) | np.diff(rows["shard"])) + 1
    shard_pieces = [(shards[int(piece[0]["shard"])], piece) for piece in np.split(rows, borders)]
    return sum(len(portion) for portion in portions(source, shard_pieces))


def rackrun_with_digests(url: str) -> int:
    """Read every shard as a whole, checked against its digest as well, as the verifier does."""
    source = open_source(url)
    shards = range(len(source.manifest.split("train").shards))
    return sum(1 for number in shards for _ in samples(source, "train", number))


opened = cache(open_source)


def stock_webdataset(url: str) -> int:
    """Read the same samples as the examples of webdataset do; nothing is verified."""
    import webdataset

    names = [shard.name for shard in opened(url).manifest.split("train").shards]
    dataset = webdataset.WebDataset([url + name for name in names], shardshuffle=False)
    return sum(1 for sample in dataset if sample["jpg"] and int(sample["cls"]) == 0)


if __name__ == "__main__":
    run(main)
