"""The server's answers by client, in a container and natively; every setting matters."""

import contextlib
import os
import re
import resource
import select
import socket
import time
from collections import Counter
from pathlib import Path

import pytest

from rackrun.errors import Problem
from rackrun.nginx import site as site_module
from rackrun.nginx.serve import NginxServer, serving, start
from rackrun.nginx.site import TEMPLATE, Site
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


def statuses(address: str, port: int) -> dict[str, str]:
    """Return the status of every request of the table."""
    return {name: status(answer(address, port, request)) for name, (request, _) in REQUESTS.items()}


@pytest.mark.parametrize("native", [False, True], ids=["container", "native"])
@pytest.mark.security("WEB-3")
def test_each_request_gets_exactly_the_status_of_the_table(folder, image, native):
    """Only GET and HEAD of shards, indexes and the manifest are answered, to our own name, in full
    or by one range."""
    needed = {name: expected for name, (_, expected) in REQUESTS.items()}
    with serving(Site(folder, port=0, native=native, image=image)) as server:
        assert statuses(server.site.address, server.site.port) == needed


LINES = TEMPLATE.read_text().splitlines()
SAID = [
    number
    for number, line in enumerate(LINES)
    if line.strip() and not line.strip().startswith(("#", "include"))
]
SLOW = ("send_timeout", "client_header_timeout")


@pytest.mark.parametrize(
    "number",
    [number for number in SAID if not LINES[number].strip().startswith(SLOW)],
    ids=lambda number: f"{number + 1}: {LINES[number].strip()}",
)
def test_no_line_of_the_configuration_can_go_unnoticed(
    folder, image, tmp_path, monkeypatch, number
):
    """Without any one of its lines nginx does not start, or is seen to behave otherwise."""
    shorter = tmp_path / "nginx.conf.template"
    shorter.write_text("\n".join(LINES[:number] + LINES[number + 1 :]))
    monkeypatch.setattr(site_module, "TEMPLATE", shorter)
    # Debian's nginx has its own folders for bodies; the container has none.
    native = "_temp_path" not in LINES[number]
    try:
        server = start(Site(folder, port=0, native=native, image="" if native else image))
    except Problem:
        return
    try:
        assert any(not as_it_should_be(server) for as_it_should_be in LOOKS)
    finally:
        server.stop()


QUANTITIES = (  # any will do as long as it is large, or only hours would show the difference
    "worker_connections 12288;",
    "limit_conn_zone $binary_remote_addr zone=hosts:1m;",
    "keepalive_timeout 600s 600s;",
    "keepalive_requests 1000000;",
    "send_timeout 600s;",
    "client_header_timeout 5s;",
    'return 200 "";',  # error_page keeps the status of the error, whatever is returned here
)


def changed(line: str) -> list[str]:
    """Return the line with each of its numbers and switches changed; a comment has none."""
    code = line.partition("  # ")[0]
    return [
        line[: matches.start()] + other(matches.group()) + line[matches.end() :]
        for matches in re.finditer(r"(?<![\w$])(\d+|on|off)(?![\w$])", code)
    ]


def other(word: str) -> str:
    """Return half the number, or the opposite switch."""
    return {"on": "off", "off": "on", "0": "1", "1": "0"}.get(word) or str(int(word) // 2)


def test_quantities_are_what_was_thought_out():
    """The numbers that no request shows at once."""
    assert set(QUANTITIES) <= {line.strip() for line in LINES}


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "line"),
    [
        (number, line)
        for number in SAID
        if LINES[number].strip() not in QUANTITIES
        for line in changed(LINES[number])
    ],
    ids=lambda value: str(value).strip(),
)
def test_no_change_of_a_line_can_go_unnoticed(folder, tmp_path, monkeypatch, number, line):
    """With another number or switch nginx does not start, or is seen to behave otherwise."""
    template = tmp_path / "nginx.conf.template"
    template.write_text("\n".join([*LINES[:number], line, *LINES[number + 1 :]]))
    monkeypatch.setattr(site_module, "TEMPLATE", template)
    try:
        server = start(Site(folder, port=0, native=True))
    except Problem:
        return
    try:
        assert any(not as_it_should_be(server) for as_it_should_be in LOOKS)
    finally:
        server.stop()


@pytest.mark.long
@pytest.mark.parametrize("ended", ["", *SLOW])
def test_a_reader_may_pause_for_a_minute_and_half_a_request_may_not(
    folder, tmp_path, monkeypatch, ended
):
    """A pause in mid-shard loses nothing, half a request ends after 10 s; without either line
    of the configuration, nginx's own minute is seen."""
    template = tmp_path / "nginx.conf.template"
    template.write_text(
        "\n".join(line for line in LINES if not ended or not line.strip().startswith(ended))
    )
    monkeypatch.setattr(site_module, "TEMPLATE", template)
    with serving(Site(folder, port=0, native=True)) as server:
        big = sparse_shard(server, 64 << 20)
        with narrow_connection(server) as half, narrow_connection(server) as pausing:
            half.sendall(b"GET /dataset.json HTTP/1.1\r\n")
            pausing.sendall(raw(f"GET {big} HTTP/1.1"))
            begun = time.monotonic()
            assert hangs_up(half, 30) is (ended != "client_header_timeout")
            time.sleep(66 - (time.monotonic() - begun))
            assert (len(_all(pausing)) > 64 << 20) is (ended != "send_timeout")


def hangs_up(connection: socket.socket, seconds: float) -> bool:
    """Return whether the server closes in time."""
    return bool(select.select([connection], [], [], seconds)[0]) and not connection.recv(1)


@pytest.mark.security("WEB-5")
def test_the_whole_configuration_passes_every_look(folder):
    """The looks that notice a missing line find nothing wrong with the file as it is."""
    with serving(Site(folder, port=0, native=True)) as server:
        assert [state.__name__ for state in LOOKS if not state(server)] == []


def statuses_are_right(server: NginxServer) -> bool:
    needed = {name: expected for name, (_, expected) in REQUESTS.items()}
    return statuses(server.site.address, server.site.port) == needed


def a_refusal_says_no_more(server: NginxServer) -> bool:
    """Return whether a refusal is a bare status: no page that names the program."""
    refused = [request for request, expected in REQUESTS.values() if expected in REFUSED]
    replies = [answer(server.site.address, server.site.port, request) for request in refused]
    return all(reply.partition(b"\r\n\r\n")[2] == b"" for reply in replies)


REFUSED = ("404", "405", "413", "416")


def headers_are_right(server: NginxServer) -> bool:
    """Return whether headers hide the version, forbid guessing types and limit pauses."""
    lasting = raw("HEAD /dataset.json HTTP/1.1", connection="keep-alive")
    closing = raw("HEAD /dataset.json HTTP/1.1")
    reply = answer(server.site.address, server.site.port, lasting + closing)
    fields = set(reply.decode().split("\r\n"))
    return {
        "Server: nginx",
        "Content-Type: application/octet-stream",
        "X-Content-Type-Options: nosniff",
        "Keep-Alive: timeout=600",
    } <= fields


def a_connection_lasts(server: NginxServer) -> bool:
    """Return whether one connection serves more requests than nginx's default of 1,000."""
    many = raw("HEAD /dataset.json HTTP/1.1", connection="keep-alive") * 1100
    reply = answer(server.site.address, server.site.port, many + raw("HEAD /dataset.json HTTP/1.1"))
    return reply.count(b"HTTP/1.1 200") == 1101


def nothing_is_logged(server: NginxServer) -> bool:
    """Return whether requests, also those that are refused, add nothing to the log of the start."""
    before = server.log
    statuses(server.site.address, server.site.port)
    return server.log == before


def files_go_straight_to_the_socket(server: NginxServer) -> bool:
    """Return whether the kernel sends files in few large pieces (sendfile)."""
    before = sum(map(reads, workers(server)))
    size = len(answer(server.site.address, server.site.port, raw(f"GET {SHARD} HTTP/1.1")))
    return sum(map(reads, workers(server))) - before < size / 32768 / 2


def every_core_has_a_worker(server: NginxServer) -> bool:
    return len(workers(server)) == os.cpu_count()


def many_files_may_be_open(server: NginxServer) -> bool:
    limits = Path(f"/proc/{workers(server)[0]}/limits").read_text()
    return bool(re.search(r"Max open files +16384 ", limits))


def one_host_cannot_take_every_connection(server: NginxServer) -> bool:
    """Return whether 512 of 1,100 concurrent requests of an address are served, others refused."""
    big = sparse_shard(server, 1 << 30)
    replies = at_once(server, raw(f"GET {big} HTTP/1.1"), 1100)
    return replies == {"200": 512, "503": 588}


LOOKS = [
    statuses_are_right,
    a_refusal_says_no_more,
    headers_are_right,
    nothing_is_logged,
    every_core_has_a_worker,
    many_files_may_be_open,
    files_go_straight_to_the_socket,
    a_connection_lasts,
    one_host_cannot_take_every_connection,
]


def workers(server: NginxServer) -> list[int]:
    """Return the process numbers of nginx's workers."""
    master = server.child.pid
    children = Path(f"/proc/{master}/task/{master}/children").read_text()
    return [int(pid) for pid in children.split()]


def reads(pid: int) -> int:
    """Return the number of read calls of a process."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["syscr"])


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
        return Counter("a page" if b"<html" in reply else status(reply) for reply in replies)


def narrow_connection(server: NginxServer) -> socket.socket:
    """Return a connection with a small receive buffer, so that little waits in the kernel."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(10)
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
