"""Blocks from other hosts: a real server process for each, real sockets, and peers that lie."""

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rackrun.shards.block_store import SPARE
from rackrun.shards.cache import CELL_BYTES
from rackrun.shards.folder import FolderSource
from rackrun.shards.http.source import HttpSource
from rackrun.shards.index import Shard, index_bytes
from rackrun.shards.peers import server
from rackrun.shards.peers.client import Peer, PeerClient, PeerTimeouts
from rackrun.shards.peers.homes import NOWHERE, homes
from rackrun.shards.peers.protocol import HAVE, NO, REQUEST_BYTES, WAIT, Request, decoded, encoded
from rackrun.shards.peers.source import PeerSource, PeerTable
from rackrun.shards.samples import Sample, portions
from rackrun.shards.source import Source
from tests.lab.data import write_tiny
from tests.lab.waiting import until
from tests.shards.conftest import TIMEOUTS, asked_for, files

SHORT = PeerTimeouts(connect_seconds=0.5, answer_seconds=0.5, fetch_seconds=1.0, pause_seconds=60.0)
PATIENT = PeerTimeouts(answer_seconds=30.0)
PLENTY = 1 << 30
HERE = "127.0.0.1"


class Hosts:
    """Hosts of a run, each with a cache and a server process; more may be added to the table."""

    def __init__(self, url: str, folder: Path, limits: Sequence[int]) -> None:
        self.token = secrets.token_bytes(16)
        self.sources = [
            PeerSource(origin(url), str(folder / f"host{number}"), limit)
            for number, limit in enumerate(limits)
        ]
        self.servers = [server.started(HERE, self.token, [source], ()) for source in self.sources]
        self.peers = [Peer(f"{n:064x}", HERE, port) for n, (_, port) in enumerate(self.servers)]

    def meet(self, timeouts: PeerTimeouts = PATIENT) -> None:
        for source, peer in zip(self.sources, self.peers, strict=True):
            table = PeerTable(self.token, tuple(self.peers), peer.identity, timeouts)
            source.join(table, share=1.0)

    def stop(self) -> None:
        for process, _ in self.servers:
            process.kill()
            process.wait()


def origin(location: str) -> Source:
    return HttpSource(location, TIMEOUTS) if "://" in location else FolderSource(location)


@contextmanager
def hosts(url: str, folder: Path, limits: Sequence[int]) -> Iterator[Hosts]:
    made = Hosts(url, folder, limits)
    try:
        yield made
    finally:
        made.stop()


def everything(source: Source) -> list[Sample]:
    """Return all samples, read as training does: in portions that are parts of blocks."""
    result = []
    rows = source.index("train")
    for number, shard in enumerate(source.manifest.split("train").shards):
        inside = rows[rows["shard"] == number]
        cuts = [inside[first : first + 7] for first in range(0, len(inside), 7)]
        for portion in portions(source, [(shard, cut) for cut in cuts]):
            result += portion
    return result


def stored(folder: Path) -> list[list[str]]:
    """Return the names of the blocks that each host keeps, the index left out."""
    return [
        [path.name for path in files(host) if "-" in path.name] for host in sorted(folder.iterdir())
    ]


def test_hosts_hold_the_data_together_and_the_origin_sends_it_once(large, large_proxy, tmp_path):
    """Each block is fetched by its home, kept there alone, and read from there by the others."""
    total = sum(path.stat().st_size for path in large.folder.glob("*.tar"))
    with hosts(large_proxy.url, tmp_path, [int(total * 0.75)] * 3) as run:
        run.meet()
        for source in run.sources:
            assert everything(source) == large.all
        counts = asked_for(large_proxy)
        assert {name: n for name, n in counts.items() if "index" not in name} == dict.fromkeys(
            (name for name in counts if "index" not in name), 1
        )
        for source in run.sources:
            assert everything(source) == large.all
        assert asked_for(large_proxy) == counts
        blocks = [name for names in stored(tmp_path) for name in names]
        assert len(blocks) == len(set(blocks)) == 2 * 3
        traffic = [source.traffic.total() for source in run.sources]
    read = 2 * len(run.sources) * sum(len(sample.image) for sample in large.all)
    assert sum(each.peers for each in traffic) > 0.3 * read
    assert total <= sum(each.origin for each in traffic) <= total + 3 * 50_000


def test_caches_with_room_for_everything_keep_everything(large, large_proxy, tmp_path):
    """The origin still sends every block once; later each host reads its own copy."""
    with hosts(large_proxy.url, tmp_path, [PLENTY, PLENTY]) as run:
        run.meet()
        for source in run.sources:
            assert everything(source) == large.all
        assert stored(tmp_path)[0] == stored(tmp_path)[1]
        blocks = {name: n for name, n in asked_for(large_proxy).items() if ".tar" in name}
        assert set(blocks.values()) == {1}
    assert everything(run.sources[0]) == large.all


def test_images_larger_than_most_blocks_come_from_other_hosts_too(tmp_path):
    """A sample of 17 MiB is a block of its own, and its home sends it whole."""
    made = write_tiny(tmp_path / "shards", shards=2, samples=2, size=17 << 20)
    total = sum(path.stat().st_size for path in made.folder.glob("*.tar"))
    with hosts(str(made.folder), tmp_path / "caches", [int(total * 0.75)] * 2) as run:
        run.meet()
        for source in run.sources:
            assert everything(source) == made.all
        traffic = [source.traffic.total() for source in run.sources]
    assert sum(each.origin for each in traffic) < 1.1 * total
    assert sum(each.peers for each in traffic) > 0.9 * total


def test_caches_too_small_for_the_data_keep_the_same_part_of_it(large, large_proxy, tmp_path):
    """What has no home is fetched in parts in every epoch; what has one stays where it is."""
    total = sum(path.stat().st_size for path in large.folder.glob("*.tar"))
    with hosts(large_proxy.url, tmp_path, [int(total * 0.45)] * 2) as run:
        run.meet()
        for source in run.sources:
            assert everything(source) == large.all
        kept, before = stored(tmp_path), asked_for(large_proxy)
        assert 0 < sum(map(len, kept)) < 2 * 3
        for source in run.sources:
            assert everything(source) == large.all
        assert stored(tmp_path) == kept
        assert [name for name in asked_for(large_proxy) - before if ".tar" in name]


def test_another_run_finds_what_the_first_one_has_read(large, large_proxy, tmp_path):
    """Homes depend on hosts and data alone: two runs on the same hosts share their caches."""
    limits = [int(sum(path.stat().st_size for path in large.folder.glob("*.tar")) * 0.75)] * 3
    with hosts(large_proxy.url, tmp_path, limits) as first:
        first.meet()
        assert everything(first.sources[0]) == large.all
        before = asked_for(large_proxy)
        with hosts(large_proxy.url, tmp_path, limits) as second:
            second.meet()
            assert everything(second.sources[2]) == large.all
    assert not [name for name in asked_for(large_proxy) - before if ".tar" in name]


def test_a_host_that_is_killed_is_replaced_by_the_origin(large, large_proxy, tmp_path, caplog):
    """Its blocks come from there, in the middle of an epoch; one line says so."""
    total = sum(path.stat().st_size for path in large.folder.glob("*.tar"))
    with hosts(large_proxy.url, tmp_path, [int(total * 0.75)] * 3) as run:
        run.meet()
        reader = run.sources[0]
        assert everything(reader) == large.all
        run.servers[1][0].kill()
        run.servers[2][0].kill()
        before = reader.traffic.total()
        assert everything(reader) == large.all
        after = reader.traffic.total()
    assert after.origin > before.origin
    assert after.peers == before.peers
    assert [record.message for record in caplog.records if "no help as a cache" in record.message]


@pytest.mark.parametrize("room", [100.0, 0.75], ids=["whole blocks", "parts of blocks"])
def test_a_full_disk_costs_only_the_cache(large, large_proxy, tmp_path, room):
    """A home that cannot store its blocks passes them on, and every read goes on."""
    total = sum(path.stat().st_size for path in large.folder.glob("*.tar"))
    with hosts(large_proxy.url, tmp_path, [int(total * room)] * 2) as run:
        run.meet()
        for folder in tmp_path.glob("host*/rackrun-cache-*"):
            for path in folder.iterdir():
                path.unlink() if path.is_file() else None
            folder.rename(folder.with_name("gone"))
            folder.write_bytes(b"")  # no folder can be made here, as on a full disk
        for source in run.sources:
            assert everything(source) == large.all
            assert source.traffic.total().peers > 0.2 * total
        assert not any(source._client.leaves_alone(number) for number in range(2))
    assert stored(tmp_path) == [[], []]


def test_a_home_looks_again_at_a_block_that_was_wrong(large, large_proxy, tmp_path, caplog):
    """A byte that has changed on its disk costs a request to the origin, and nobody the home."""
    total = sum(path.stat().st_size for path in large.folder.glob("*.tar"))
    with hosts(large_proxy.url, tmp_path, [int(total * 0.75)] * 2) as run:
        run.meet()
        for source in run.sources:
            assert everything(source) == large.all
        blocks = [path for path in files(tmp_path / "host1") if "-" in path.name]
        whole = {path: path.read_bytes() for path in blocks}
        for path, data in whole.items():
            path.write_bytes(
                data[: len(data) // 2]
                + bytes([data[len(data) // 2] ^ 1])
                + data[len(data) // 2 + 1 :]
            )
        reader = run.sources[0]
        before = reader.traffic.total().origin
        assert everything(reader) == large.all
        assert reader.traffic.total().origin == before
        assert {path: path.read_bytes() for path in blocks} == whole
    assert "no help as a cache" not in caplog.text


def test_all_blocks_are_kept_where_there_is_room_for_them_and_the_indexes(large, tmp_path):
    """Beside what a cache leaves free; a byte less, and hosts keep a part each."""
    folder = FolderSource(str(large.folder))
    needed = sum(shard.bytes for shard in folder.manifest.split("train").shards)
    needed += index_bytes(len(large.all))
    enough = int(needed / (1 - SPARE) / 0.5) + 4
    peers = tuple(Peer(name, HERE, 1) for name in ("a", "b"))
    for limit, keeps_all in ((enough, True), (enough - 8, False)):
        source = PeerSource(folder, str(tmp_path), limit)
        source.join(PeerTable(bytes(16), peers, "a", SHORT), share=0.5)
        shards = source.manifest.split("train").shards
        kept = [source.keeps(shard, block) for shard in shards for block in source.blocks_of(shard)]
        assert any(kept) and all(kept) == keeps_all


def test_a_host_that_fails_again_is_left_alone_for_longer(large):
    """Twice as long each time in a row; an answer between two failures begins anew."""
    folder = FolderSource(str(large.folder))
    (shard, *_) = folder.manifest.split("train").shards
    token, replies = secrets.token_bytes(16), [nonsense, nonsense, right, nonsense]

    def reply(connection: socket.socket, request: Request, data: bytes) -> None:
        replies.pop(0)(connection, request, data)

    pauses = []
    with lying_peer(token, {shard.sha256: large.folder / shard.name}, reply) as port:
        client = PeerClient(token, [Peer("a", HERE, port)], replace(PATIENT, pause_seconds=500.0))
        while replies:
            client._left_until.clear()
            has_failed = client.ask(0, Request(shard.sha256, 0, 100)) is None
            pauses.append(client._left_until[0] - time.monotonic() if has_failed else 0)
    assert [round(pause, -2) for pause in pauses] == [500, 1000, 0, 500]


Reply = Callable[[socket.socket, Request, bytes], None]


@contextmanager
def lying_peer(token: bytes, shards: dict[str, Path], reply: Reply) -> Iterator[int]:
    """Yield the port of a host that answers as `reply` does, given the right bytes."""
    listener = socket.create_server((HERE, 0))
    with listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                while data := connection.recv(REQUEST_BYTES, socket.MSG_WAITALL):
                    request = decoded(token, data)
                    assert request
                    with shards[request.sha256].open("rb") as file:
                        file.seek(request.offset)
                        reply(connection, request, file.read(request.length))

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def right(connection: socket.socket, request: Request, data: bytes) -> None:
    connection.sendall(HAVE + data)


def right_when_verified(connection: socket.socket, request: Request, data: bytes) -> None:
    (right if request.verify else poisoned)(connection, request, data)


def poisoned(connection: socket.socket, request: Request, data: bytes) -> None:
    spoilt = bytearray(data)
    spoilt[len(data) // 2] ^= 1
    connection.sendall(HAVE + spoilt)


def stale(connection: socket.socket, request: Request, data: bytes) -> None:
    connection.sendall(HAVE + data[-1:] + data[:-1])


def zeroed(connection: socket.socket, request: Request, data: bytes) -> None:
    connection.sendall(HAVE + bytes(len(data)))


def truncated(connection: socket.socket, request: Request, data: bytes) -> None:
    connection.sendall(HAVE + data[: len(data) // 2])
    connection.close()


def cut_short_and_silent(connection: socket.socket, request: Request, data: bytes) -> None:
    connection.sendall(HAVE + data[: len(data) // 2])


def silent(connection: socket.socket, request: Request, data: bytes) -> None:
    pass


def slow(connection: socket.socket, request: Request, data: bytes) -> None:
    connection.sendall(HAVE)
    for byte in data:
        connection.sendall(bytes([byte]))
        time.sleep(0.01)


def waits_forever(connection: socket.socket, request: Request, data: bytes) -> None:
    while True:
        connection.sendall(WAIT)
        time.sleep(0.01)


def nonsense(connection: socket.socket, request: Request, data: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + data)


def has_nothing(connection: socket.socket, request: Request, data: bytes) -> None:
    connection.sendall(NO)


def talks_on(connection: socket.socket, request: Request, data: bytes) -> None:
    connection.sendall(HAVE + data + HAVE + bytes(1000))


LIES = (
    *(poisoned, stale, zeroed, truncated, cut_short_and_silent, silent, slow, waits_forever),
    *(nonsense, has_nothing, talks_on),
)


@pytest.mark.parametrize("reply", LIES, ids=lambda reply: reply.__name__)
def test_nothing_that_a_peer_sends_is_believed(large, tmp_path, reply, caplog):
    """Poisoned, truncated, stale, slow or silent: the samples are right, and within the limit."""
    source = PeerSource(FolderSource(str(large.folder)), str(tmp_path), PLENTY // 64)
    shards = {
        shard.sha256: large.folder / shard.name for shard in source.manifest.split("train").shards
    }
    token = secrets.token_bytes(16)
    with lying_peer(token, shards, reply) as port:
        peers = (Peer("own", HERE, 0), Peer("liar", HERE, port))
        source.join(PeerTable(token, peers, "own", SHORT), share=0.4)  # not room for everything
        began = time.monotonic()
        assert everything(source) == large.all
        seconds = time.monotonic() - began
    limit = SHORT.answer_seconds + SHORT.fetch_seconds
    assert seconds < limit + 20.0  # once; then the peer is left alone
    liar = sorted(["own", "liar"]).index("liar")
    assert source._client.leaves_alone(liar) == (reply is not has_nothing)
    if reply is not talks_on:  # what it sends on may look like anything
        is_named = "not those of the index" in caplog.text
        assert is_named == (reply in (poisoned, stale, zeroed))


def test_any_part_of_a_sample_can_be_read_again(large, tmp_path, caplog):
    """A peer is judged by whole samples, of which a reader may want the middle."""
    source = PeerSource(FolderSource(str(large.folder)), str(tmp_path), PLENTY // 64)
    shards = source.manifest.split("train").shards
    paths = {shard.sha256: large.folder / shard.name for shard in shards}
    token = secrets.token_bytes(16)
    with lying_peer(token, paths, right_when_verified) as port:
        peers = (Peer("own", HERE, 0), Peer("other", HERE, port))
        source.join(PeerTable(token, peers, "own", SHORT), share=0.4)
        for row in source.index("train")[::3]:
            shard, offset = shards[row["shard"]], int(row["offset"]) + 700
            data = paths[shard.sha256].read_bytes()[offset : offset + 100]
            assert bytes(source.reread(shard, offset, 100)) == data
    assert source.traffic.total().peers > 0
    assert "no help as a cache" not in caplog.text


@pytest.mark.long
def test_of_five_hundred_lies_none_is_believed_and_none_takes_longer_than_the_limit(
    large, tmp_path
):
    """Each lie of its own kind, to a reader that has not met the liar before."""
    folder, expected = FolderSource(str(large.folder)), large.all
    shards, rows = folder.manifest.split("train").shards, folder.index("train")
    paths = {shard.sha256: large.folder / shard.name for shard in shards}
    token, dice, lies = secrets.token_bytes(16), random.Random(7), Counter[str]()
    longest = dict.fromkeys(LIES, 0.0)
    with ExitStack() as liars:
        ports = {reply: liars.enter_context(lying_peer(token, paths, reply)) for reply in LIES}
        while lies.total() < 500:
            reply, row = dice.choice(LIES), dice.randrange(len(rows))
            source = PeerSource(folder, str(tmp_path), PLENTY // 64)
            peers = (Peer("own", HERE, 0), Peer("liar", HERE, ports[reply]))
            source.join(PeerTable(token, peers, "own", SHORT), share=0.4)
            shard = shards[int(rows[row]["shard"])]
            ((block, _),) = source.parts_of(shard, int(rows[row]["offset"]), 1)
            lies[reply.__name__] += not source.keeps(shard, block)
            began = time.monotonic()
            (sample,) = next(portions(source, [(shard, rows[row : row + 1])]))
            longest[reply] = max(longest[reply], time.monotonic() - began)
            assert sample == expected[row]
    assert len(lies) == len(LIES)
    assert max(longest.values()) < SHORT.answer_seconds + SHORT.fetch_seconds + 20.0


@pytest.mark.security("DATA-7")
def test_strangers_are_not_answered(large, tmp_path):
    """Another token, half a request, HTTP, noise: closed without a byte, and readers are served."""
    with hosts(str(large.folder), tmp_path, [PLENTY]) as run:
        port = run.servers[0][1]
        shard = run.sources[0].manifest.split("train").shards[0]
        right = encoded(run.token, Request(shard.sha256, 0, 1000))
        wrong = encoded(secrets.token_bytes(16), Request(shard.sha256, 0, 1000))
        for stranger in (wrong, b"GET / HTTP/1.1\r\n" + bytes(100), secrets.token_bytes(200)):
            assert conversation(port, stranger) == b""
        assert conversation(port, wrong[:20], ends=False) == b""  # until its time is up
        expected = (large.folder / shard.name).read_bytes()[:1000]
        assert conversation(port, right) == HAVE + expected


def test_a_stranger_cannot_keep_a_connection_by_single_bytes(large, tmp_path):
    """The time for a first request is one for all of its bytes: closed before they have come."""
    with hosts(str(large.folder), tmp_path, [PLENTY]) as run:
        sent = 0
        with socket.create_connection((HERE, run.servers[0][1]), timeout=60) as connection:
            connection.setblocking(False)
            with suppress(ConnectionError):
                while sent < REQUEST_BYTES - 1:
                    with suppress(BlockingIOError):
                        assert connection.recv(1) == b""
                        break
                    sent += connection.send(b"r")
                    time.sleep(0.5)
        assert sent < REQUEST_BYTES - 1


def conversation(port: int, data: bytes, ends: bool = True) -> bytes:
    """Send bytes to a server, and that no more will come; return its answer without WAITs."""
    with socket.create_connection((HERE, port), timeout=60) as connection:
        received = b""
        with suppress(ConnectionError):
            connection.sendall(data)
            if ends:
                with suppress(OSError):  # closed by the server already
                    connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                received += part
    return received.lstrip(WAIT)


@pytest.mark.security("DATA-7")
def test_only_parts_of_known_shards_are_sent(large, tmp_path):
    """An unknown shard, a range beyond the end or across blocks, none at all: NO, and no more."""
    with hosts(str(large.folder), tmp_path, [PLENTY]) as run:
        port = run.servers[0][1]
        shard = run.sources[0].manifest.split("train").shards[0]
        block = run.sources[0].blocks_of(shard)[0]
        for request in (
            Request("0" * 64, 0, 100),
            Request(shard.sha256, shard.bytes, 1),
            Request(shard.sha256, 2**63, 1),
            Request(shard.sha256, 0, 0),
            Request(shard.sha256, 0, 2**32 - 1),
            Request(shard.sha256, block.end - 10, 20),
            Request(shard.sha256, shard.bytes - 10, 20),
        ):
            assert conversation(port, encoded(run.token, request)) == NO, request


def test_no_request_ends_the_server(large, tmp_path):
    """Any bytes, with the token or without: an answer, NO, or the end of the connection."""
    with hosts(str(large.folder), tmp_path, [PLENTY]) as run:
        port = run.servers[0][1]
        shard = run.sources[0].manifest.split("train").shards[0]
        digests = st.sampled_from([bytes.fromhex(shard.sha256), bytes(32)])
        numbers = st.tuples(st.integers(0, 2 * shard.bytes), st.integers(0, 1 << 20))
        content = (large.folder / shard.name).read_bytes()

        @settings(max_examples=60)
        @given(digests, numbers, st.binary(max_size=80), st.booleans())
        def ask(digest: bytes, span: tuple[int, int], rest: bytes, verify: bool) -> None:
            offset, length = span
            request = encoded(run.token, Request(digest.hex(), offset, length, verify))
            reply = conversation(port, request + rest)
            right = HAVE + content[offset : offset + length]
            assert reply in (right, NO)
            assert digest.strip(b"\0") or reply == NO

        ask()
        assert run.servers[0][0].poll() is None


def test_connections_are_limited_and_those_in_use_survive(large, tmp_path):
    """A thousand strangers and more: the oldest of them go, and a host of the run is answered."""
    with hosts(str(large.folder), tmp_path, [PLENTY]) as run:
        port = run.servers[0][1]
        shard = run.sources[0].manifest.split("train").shards[0]
        strangers = [
            socket.create_connection((HERE, port), timeout=30)
            for _ in range(server.MOST_CONNECTIONS + 50)
        ]
        request = encoded(run.token, Request(shard.sha256, 0, 1000))
        assert conversation(port, request)[:1] == HAVE
        for stranger in strangers:
            stranger.close()


def test_a_server_ends_with_its_rank_even_when_that_is_killed(large, tmp_path):
    """Nothing listens afterwards; Ctrl-C and SIGTERM do not end it before."""
    code = (
        "import sys, time; from rackrun.shards.peers import server;"
        "from rackrun.shards.peers.source import *;"
        "from rackrun.shards.folder import FolderSource;"
        "source = PeerSource(FolderSource(sys.argv[1]), sys.argv[2], 1 << 30);"
        "process, port = server.started('127.0.0.1', bytes(16), [source], ('train',));"
        "print(process.pid, port, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(large.folder), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout
        pid, port = map(int, rank.stdout.readline().split())
        shard = FolderSource(str(large.folder)).manifest.split("train").shards[0]
        request = encoded(bytes(16), Request(shard.sha256, 0, 1000))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        assert conversation(port, request)[:1] == HAVE
        rank.kill()
    until(lambda: not listens(port), "the server ends", 10)


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((HERE, port)) == 0


def shards_of(counts: Sequence[int]) -> list[Shard]:
    """Return shards of these sizes in bytes."""
    return [
        Shard(f"a-train-{n:06d}.tar", 1, size, f"{n * 0x9E3779B97F4A7C15 % 2**64:016x}" + "0" * 48)
        for n, size in enumerate(counts)
    ]


SIZES = st.lists(st.integers(1, 60 << 20), min_size=1, max_size=60)


@given(SIZES, st.integers(1, 12), st.floats(0.1, 3))
@example([60 << 20] * 270, 8, 3.0)  # so many blocks that chance alone would be less even
def test_homes_are_even_and_within_the_limit(sizes, count, share):
    """No host has more than its share or its limit; what no host has room for has no home."""
    names = [f"host{number}" for number in range(count)]
    shards, total = shards_of(sizes), sum(sizes)
    limit = int(total / count * share)
    result = homes(names, shards, CELL_BYTES, limit)
    held = Counter[int]()
    for shard in shards:
        cells = result[shard.sha256].tolist()
        assert len(cells) == -(-shard.bytes // CELL_BYTES)
        for number, home in enumerate(cells):
            held[home] += min(CELL_BYTES, shard.bytes - number * CELL_BYTES)
    homeless = held.pop(NOWHERE, 0)
    assert max(held.values(), default=0) <= min(limit, total / count * 1.02 + CELL_BYTES)
    if homeless and count == 1:
        assert held[0] + homeless > limit
    if limit >= total / count * 1.02 + CELL_BYTES:
        assert not homeless


@given(SIZES, st.integers(2, 12), st.integers(0, 11))
def test_a_host_that_goes_moves_little_more_than_its_own_blocks(sizes, count, gone):
    """The homes of the others stay, but for the few blocks that even out the shares."""
    names = [f"host{number}" for number in range(count)]
    gone %= count
    left = [name for name in names if name != names[gone]]
    shards = shards_of(sizes * 4)
    before = homes(names, shards, CELL_BYTES, PLENTY << 10)
    after = homes(left, shards, CELL_BYTES, PLENTY << 10)
    cells = moved = 0
    for shard in shards:
        for old, new in zip(before[shard.sha256], after[shard.sha256], strict=True):
            cells += 1
            moved += old != gone and names[old] != left[new]
    assert moved <= 0.25 * cells + 5
    again = homes(names, shards, CELL_BYTES, PLENTY << 10)
    assert all((again[digest] == before[digest]).all() for digest in before)
