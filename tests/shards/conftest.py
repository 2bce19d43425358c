"""A small shard folder, a real nginx in front of it, and a proxy that spoils its answers."""

import re
import tempfile
from collections import Counter
from collections.abc import Iterator

import pytest

from rackrun.nginx.serve import NginxServer, serving
from rackrun.nginx.site import Site
from rackrun.shards.http_source import Timeouts
from tests.lab.data import Tiny, write_tiny
from tests.lab.servers import Fault, Proxy, open_folder


@pytest.fixture(autouse=True)
def own_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Give each test a folder for temporary files, where indexes are kept."""
    tmp_path_factory.getbasetemp()  # pytest's own, made at first use, stays where it is
    with open_folder() as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setenv("TMPDIR", str(folder))  # for processes that are started
        yield


@pytest.fixture
def fresh() -> Iterator[Tiny]:
    """Yield a shard folder that a test may change; outside pytest's own, which root's nginx may not
    enter."""
    yield from _tiny()


@pytest.fixture(scope="session")
def tiny() -> Iterator[Tiny]:
    """Yield the same for tests that only read."""
    yield from _tiny()


@pytest.fixture(scope="session")
def large() -> Iterator[Tiny]:
    """Yield two shards of several blocks each, only to be read."""
    yield from _tiny(shards=2, samples=40, size=300_000)


def _tiny(**sizes: int) -> Iterator[Tiny]:
    with open_folder() as top:
        yield write_tiny(top / "shards", **sizes)


@pytest.fixture(scope="session")
def server(tiny: Tiny) -> Iterator[NginxServer]:
    """Yield a native nginx over the folder that is only read."""
    with serving(Site(tiny.folder, port=0, native=True)) as server:
        yield server


@pytest.fixture(scope="session")
def large_server(large: Tiny) -> Iterator[NginxServer]:
    """Yield a native nginx over the large folder."""
    with serving(Site(large.folder, port=0, native=True)) as server:
        yield server


@pytest.fixture
def proxy(server: NginxServer) -> Iterator[Proxy]:
    """Yield a proxy before the small folder; it passes everything on unless a fault is set."""
    yield from _proxy(server)


@pytest.fixture
def large_proxy(large_server: NginxServer) -> Iterator[Proxy]:
    """Yield a proxy before the large folder."""
    yield from _proxy(large_server)


def _proxy(server: NginxServer) -> Iterator[Proxy]:
    proxy = Proxy((server.site.address, server.site.port))
    yield proxy
    proxy.stop()


TIMEOUTS = Timeouts(stall_seconds=20, total_seconds=60)


def asked_for(proxy: Proxy) -> Counter[str]:
    """Return how often each file was requested, the manifest left out."""
    lines = (request.decode() for request in proxy.requests)
    result = (re.search(r"GET /(\S+) .*Range: bytes=(\S+)", line, re.DOTALL) for line in lines)
    return Counter(f"{each[1]} {each[2]}" for each in result if each and "json" not in each[1])


SHORT = Timeouts(connect_seconds=1, stall_seconds=0.4, total_seconds=5, first_seconds=2)


def always(fault: Fault) -> Fault:
    """Spoil every answer but those of the manifest and the index."""
    return lambda reply: fault(reply) if reply.number > 1 else reply.send()


def status(line: str, *fields: str) -> Fault:
    """Return the fault of another status."""
    head = "\r\n".join([f"HTTP/1.1 {line}", *fields, "Content-Length: 5", "", ""]).encode()
    return lambda reply: reply.send(head=head, body=b"sorry")
