"""The server's answers by client, in a container and natively."""

import contextlib
import resource
import select
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.nginx.serve import NginxServer, serving, start
from rackrun.nginx.site import Site
from tests.nginx.conftest import CLOSED, _all, answer, raw, status

SHARD = "/cats-train-000000.tar"


REQUESTS: dict[str, tuple[bytes, str]] = {
    "manifest": (raw("GET /dataset.json HTTP/1.1"), "200"),
    "index": (raw("GET /cats-train.index.npy HTTP/1.1"), "200"),
    "shard": (raw(f"GET {SHARD} HTTP/1.1"), "200"),
    "shard of another set": (raw("GET /9cats-train-000006.tar HTTP/1.1"), "200"),
    "head": (raw(f"HEAD {SHARD} HTTP/1.1"), "200"),
    "range": (raw(f"GET {SHARD} HTTP/1.1", "Range: bytes=512-5969"), "206"),
    "open range": (raw(f"GET {SHARD} HTTP/1.1", "Range: bytes=512-"), "206"),
    "last bytes": (raw(f"GET {SHARD} HTTP/1.1", "Range: bytes=-1509"), "206"),
    "by another of our names": (raw("GET /dataset.json HTTP/1.1", host="localhost:80"), "200"),
    "range beyond the end": (raw(f"GET {SHARD} HTTP/1.1", "Range: bytes=9999999-"), "416"),
    "range backwards": (raw(f"GET {SHARD} HTTP/1.1", "Range: bytes=9-3"), "416"),
    "two ranges": (raw(f"GET {SHARD} HTTP/1.1", "Range: bytes=0-1,4-5"), "416"),
    "range in lines": (raw(f"GET {SHARD} HTTP/1.1", "Range: lines=0-1"), "416"),
    "range of nothing": (raw(f"GET {SHARD} HTTP/1.1", "Range: bytes=-"), "416"),
    "folder": (raw("GET / HTTP/1.1"), "404"),
    "folder called like a shard": (raw("GET /cats-train-000002.tar HTTP/1.1"), "404"),
    "inside that folder": (raw("GET /cats-train-000002.tar/ HTTP/1.1"), "404"),
    "symbolic link": (raw("GET /cats-train-000001.tar HTTP/1.1"), "404"),
    "partial file": (raw("GET /.cats-train-000003.tar.partial HTTP/1.1"), "404"),
    "shard of another program": (raw("GET /other.program_0.tar HTTP/1.1"), "200"),
    "shard that is in no manifest": (raw("GET /cats-train-000004.tar HTTP/1.1"), "200"),
    "shard by a name of another case": (raw("GET /CATS-train-000000.tar HTTP/1.1"), "404"),
    "ending of another case": (raw("GET /cats-train-000000.TAR HTTP/1.1"), "404"),
    "earlier manifest": (raw("GET /dataset.v1.json HTTP/1.1"), "200"),
    "copy of a manifest": (raw("GET /dataset.v2.json.bak HTTP/1.1"), "404"),
    "manifest of no version": (raw("GET /dataset.vx.json HTTP/1.1"), "404"),
    "report": (raw("GET /report.json HTTP/1.1"), "404"),
    "another file of the folder": (raw("GET /notes.txt HTTP/1.1"), "404"),
    "shard that nginx may not read": (raw("GET /cats-train-000008.tar HTTP/1.1"), "404"),
    "no such shard": (raw("GET /cats-train-000009.tar HTTP/1.1"), "404"),
    "file of the system": (raw("GET /etc/passwd HTTP/1.1"), "404"),
    "parent": (raw("GET /../secret-train-000000.tar HTTP/1.1"), "400"),
    "parent, encoded": (raw("GET /%2e%2e/secret-train-000000.tar HTTP/1.1"), "400"),
    "parent, encoded slash": (raw("GET /..%2fsecret-train-000000.tar HTTP/1.1"), "400"),
    "parent, encoded twice": (raw("GET /%252e%252e/secret-train-000000.tar HTTP/1.1"), "404"),
    "null byte": (raw(f"GET {SHARD}%00.txt HTTP/1.1"), "400"),
    "newline in the name": (raw(f"GET {SHARD}%0a HTTP/1.1"), "404"),
    "status page": (raw("GET /nginx_status HTTP/1.1"), "404"),
    "post": (raw("POST /dataset.json HTTP/1.1"), "405"),
    "put": (raw("PUT /cats-train-000007.tar HTTP/1.1", "Content-Length: 2", body="hi"), "405"),
    "delete": (raw(f"DELETE {SHARD} HTTP/1.1"), "405"),
    "options": (raw("OPTIONS / HTTP/1.1"), "405"),
    "trace": (raw("TRACE / HTTP/1.1"), "405"),
    "patch": (raw(f"PATCH {SHARD} HTTP/1.1"), "405"),
    "propfind": (raw("PROPFIND / HTTP/1.1"), "405"),
    "made-up method": (raw("FETCH /dataset.json HTTP/1.1"), "405"),
    "body": (raw("GET /dataset.json HTTP/1.1", "Content-Length: 2", body="hi"), "413"),
    "body in chunks": (
        raw("GET /dataset.json HTTP/1.1", "Transfer-Encoding: chunked", body="0\r\n\r\n"),
        "413",
    ),
    "no body, said so": (raw("GET /dataset.json HTTP/1.1", "Content-Length: 0"), "200"),
    "for another host": (raw("GET /dataset.json HTTP/1.1", host="evil.example"), CLOSED),
    "for no host": (raw("GET /dataset.json HTTP/1.1", host=""), "400"),
    "HTTP/1.0 for no host": (raw("GET /dataset.json HTTP/1.0", host=""), CLOSED),
    "as a proxy": (raw("GET http://evil.example/ HTTP/1.1"), CLOSED),
    "tunnel": (raw("CONNECT evil.example:443 HTTP/1.1"), "400"),
    "10,000 headers": (
        raw("GET /dataset.json HTTP/1.1", *(f"X-{number}: 1" for number in range(10_000))),
        "400",
    ),
    "long name": (raw(f"GET /{'a' * 40_000}.tar HTTP/1.1"), "414"),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "400"),
}


def statuses(server: NginxServer) -> dict[str, str]:
    """Return the status of every request of the table."""
    address, port = server.site.address, server.site.port
    return {name: status(answer(address, port, request)) for name, (request, _) in REQUESTS.items()}


@pytest.mark.parametrize("native", [False, True], ids=["container", "native"])
@pytest.mark.security("WEB-3")
def test_each_request_gets_exactly_the_status_of_the_table(folder, image, native):
    """Only GET and HEAD of shards, indexes and the manifest are answered, to our own name, in full
    or by one range."""
    needed = {name: expected for name, (_, expected) in REQUESTS.items()}
    with serving(Site(folder, port=0, native=native, image=image)) as server:
        assert statuses(server) == needed


@pytest.fixture
def server(folder: Path) -> Iterator[NginxServer]:
    with serving(Site(folder, port=0, native=True)) as server:
        yield server


@pytest.mark.security("WEB-3")
def test_below_a_path_the_folder_is_served_there_alone(folder):
    """As a run serves it; whoever does not know the path gets 404 for everything."""
    server = start(Site(folder, port=0, native=True), "/se-c_ret/")
    try:
        assert server.url.endswith("/se-c_ret/")
        replies = {
            path: status(answer("127.0.0.1", server.site.port, raw(f"GET {path} HTTP/1.1")))
            for path in (*THERE, *NOT_THERE)
        }
    finally:
        server.stop()
    assert replies == {**dict.fromkeys(THERE, "200"), **dict.fromkeys(NOT_THERE, "404")}


THERE = ("/se-c_ret/dataset.json", f"/se-c_ret{SHARD}")
NOT_THERE = (
    *("/dataset.json", SHARD, "/", "/se-c_ret", "/se-c_ret/", "/SE-C_RET/dataset.json"),
    *("/se-c_re/dataset.json", f"/x/se-c_ret{SHARD}", f"/se-c_ret{SHARD}%0a"),
    *(f"/se-c_ret/x{SHARD}", f"/se-c_ret/.{SHARD[1:]}.partial"),
)


def test_headers_hide_the_version_and_forbid_guessing_types(server):
    request = raw("HEAD /dataset.json HTTP/1.1")
    reply = answer(server.site.address, server.site.port, request)
    assert {
        "Server: nginx",
        "Content-Type: application/octet-stream",
        "X-Content-Type-Options: nosniff",
    } <= set(reply.decode().split("\r\n"))


@pytest.mark.security("WEB-5")
def test_requests_add_nothing_to_the_log(server):
    """Nor do those that are refused: a client could fill the disk."""
    before = server.log
    statuses(server)
    assert server.log == before


@pytest.mark.security("WEB-5")
def test_one_address_has_512_requests_under_way(server):
    """Of 1,100 concurrent ones; the others are refused with a status, and may ask again."""
    big = sparse_shard(server, 1 << 30)
    replies = at_once(server, raw(f"GET {big} HTTP/1.1"), 1100)
    assert replies == {"200": 512, "503": 588}


@pytest.mark.long
def test_a_reader_may_pause_for_a_minute_and_half_a_request_may_not(server):
    """A pause in mid-shard loses nothing; half a request ends after 10 s."""
    big = sparse_shard(server, 64 << 20)
    with narrow_connection(server) as half, narrow_connection(server) as pausing:
        half.sendall(b"GET /dataset.json HTTP/1.1\r\n")
        pausing.sendall(raw(f"GET {big} HTTP/1.1"))
        begun = time.monotonic()
        assert hangs_up(half, 30)
        time.sleep(66 - (time.monotonic() - begun))
        assert len(_all(pausing)) > 64 << 20


def workers(server: NginxServer) -> list[int]:
    """Return the process numbers of nginx's workers."""
    master = server.child.pid
    children = Path(f"/proc/{master}/task/{master}/children").read_text()
    return [int(pid) for pid in children.split()]


def hangs_up(connection: socket.socket, seconds: float) -> bool:
    """Return whether the server closes in time."""
    return bool(select.select([connection], [], [], seconds)[0]) and not connection.recv(1)


def sparse_shard(server: NginxServer, size: int) -> str:
    """Make a sparse shard, too large for the buffers of a socket; return its path."""
    name = "cats-train-000005.tar"
    with (server.site.folder / name).open("wb") as file:
        file.truncate(size)
    return f"/{name}"


def at_once(server: NginxServer, request: bytes, number: int) -> Counter[str]:
    """Count the statuses of concurrent requests of which only the first line is read."""
    with contextlib.ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        connections = [stack.enter_context(narrow_connection(server)) for _ in range(number)]
        for connection in connections:
            connection.sendall(request)
        replies = [first_bytes(connection) for connection in connections]
        return Counter(map(status, replies))


def narrow_connection(server: NginxServer) -> socket.socket:
    """Return a connection with a small receive buffer, so that little waits in the kernel."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((server.site.address, server.site.port))
    return connection


def first_bytes(connection: socket.socket) -> bytes:
    try:
        return connection.recv(512)
    except ConnectionResetError:
        return b""


def test_one_clients_idle_connections_keep_no_other_out(folder):
    """8,300 connections with one byte each, and no request: the next client is served at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack, serving(Site(folder, port=0, native=True)) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(8300):
            idle = stack.enter_context(
                socket.create_connection((server.site.address, server.site.port))
            )
            idle.send(b"G")
        reply = answer(server.site.address, server.site.port, raw("HEAD /dataset.json HTTP/1.1"))
        assert status(reply) == "200"
