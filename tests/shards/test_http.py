"""Shards over HTTP: what a server in trouble costs, and what a wrong answer comes to."""

import contextlib
import multiprocessing
import pickle
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rackrun.contract import variables
from rackrun.errors import DataError, UsageError
from rackrun.shards.http_source import AHEAD, HttpSource
from rackrun.shards.open import open_source
from rackrun.shards.samples import Sample, portions
from rackrun.shards.source import Source
from tests.lab.data import everything
from tests.lab.servers import Answer, Fault, hashed, serving_tls, serving_with
from tests.lab.waiting import until
from tests.shards.conftest import SHORT, always, status


def once(fault: Fault, at: int = 2) -> Fault:
    """Spoil one answer only: by default that to the first request for a shard."""
    return lambda reply: fault(reply) if reply.number == at else reply.send()


def test_what_a_server_sends_is_what_the_folder_holds(tiny, server):
    """The manifest, the index, every sample, over a connection or two that are kept."""
    source = open_source(server.url)
    assert everything(source) == tiny.all
    assert source.manifest == open_source(str(tiny.folder)).manifest
    shard = source.manifest.split("train").shards[1]
    assert source.read(shard, 700, 900) == (tiny.folder / shard.name).read_bytes()[700:1600]
    assert source.read(shard, 5, 0) == b""


def test_connections_are_kept(server):
    """A hundred ranges, one after the other, need one connection."""
    source = HttpSource(server.url)
    shard = source.manifest.split("train").shards[0]
    for offset in range(100):
        source.read(shard, offset, 10)
    assert len(source.idle) == 1


def cut(reply: Answer) -> None:
    reply.send(body=reply.body[:700])
    reply.hang_up()


def cut_by_reset(reply: Answer) -> None:
    reply.send(body=reply.body[:700])
    reply.reset()


def cut_in_the_head(reply: Answer) -> None:
    reply.send(head=reply.head[:20], body=b"")
    reply.hang_up()


def no_answer(reply: Answer) -> None:
    reply.hang_up()


def stalled(reply: Answer) -> None:
    reply.send(body=reply.body[:700])
    reply.stall()


def silent(reply: Answer) -> None:
    reply.stall()


def drip(reply: Answer) -> None:
    """Send a byte now and then, so that no single wait is ever long."""
    reply.client.sendall(reply.head)
    for position in range(len(reply.body)):
        if reply.closing.wait(0.02):
            break
        reply.client.sendall(reply.body[position : position + 1])


def no_end_of_heads(reply: Answer) -> None:
    while not reply.closing.is_set():
        reply.client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


PASSING = {
    "cut": cut,
    "cut by a reset": cut_by_reset,
    "no answer": no_answer,
    "stalled": stalled,
    "silent": silent,
    "slower than a modem": drip,
    "no end of heads": no_end_of_heads,
    "not HTTP": lambda reply: reply.send(head=b"hello\r\n\r\n", body=b""),
    "500": status("500 Internal Server Error"),
    "502": status("502 Bad Gateway"),
    "503": status("503 Service Unavailable", "Retry-After: 0"),
    "429": status("429 Too Many Requests"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_server_in_trouble_costs_time_and_no_sample(tiny, proxy, fault):
    """Whatever happens to an answer, the same samples come out as without."""
    source = HttpSource(proxy.url, SHORT)
    proxy.fault = once(fault)
    assert everything(source) == tiny.all
    assert source.troubles == 1


@pytest.mark.parametrize("fault", [cut, silent, PASSING["500"]])
def test_a_server_that_stays_in_trouble_is_given_up(proxy, fault):
    """The error names the URL, the byte, what was wrong last, and how long that was tried."""
    source = HttpSource(proxy.url, replace(SHORT, total_seconds=0.5))
    proxy.fault = always(fault)
    url = re.escape(f"{proxy.url}tiny-train-000000.tar")
    with pytest.raises(DataError, match=rf"{url}: byte \d+: .+; gave up after 0\.5 s"):
        everything(source)


def test_a_reader_may_pause_longer_than_a_server_may(tiny, server):
    """Only the time that the server takes counts, not what is done between two blocks."""
    source = HttpSource(server.url, replace(SHORT, stall_seconds=0.1, total_seconds=0.3))
    shard = source.manifest.split("train").shards[0]
    blocks = source.stream(shard)
    result = next(blocks)
    time.sleep(0.5)
    assert b"".join([result, *blocks]) == (tiny.folder / shard.name).read_bytes()


def test_what_broke_off_is_asked_for_from_the_missing_byte_on(tiny, proxy):
    """What has come is not fetched again."""
    source = HttpSource(proxy.url, SHORT)
    proxy.fault = once(cut)
    shard = source.manifest.split("train").shards[0]
    source.index("train")
    assert source.read(shard, 512, 2048) == (tiny.folder / shard.name).read_bytes()[512:2560]
    first, second = proxy.requests[2:]
    assert b"Range: bytes=512-2559\r\n" in first
    assert b"Range: bytes=1212-2559\r\n" in second


def test_the_next_ranges_are_on_their_way_before_the_first_is_used(proxy):
    """Several requests are under way, on connections of their own, ahead of the consumer."""
    source = HttpSource(proxy.url, SHORT)
    shard = source.manifest.split("train").shards[0]
    blocks = source.reads((shard, offset, 512) for offset in range(0, 512 * 12, 512))
    next(blocks)
    until(lambda: len(proxy.requests) == 1 + AHEAD + 1)
    blocks.close()
    assert len(list(source.reads([(shard, 0, 512)]))) == 1


def test_the_wish_of_a_busy_server_is_respected(tiny, proxy):
    """Retry-After in seconds is a lower bound, beyond our limit an error, and else nothing."""
    source = HttpSource(proxy.url, SHORT)
    proxy.fault = once(status("503 Service Unavailable", "Retry-After: 1"))
    begun = time.monotonic()
    assert everything(source) == tiny.all
    assert time.monotonic() - begun >= 1
    for nonsense in ("soon", "9" * 5000, "\u0661", "Mon, 01 Jan 2999 00:00:00 GMT", ",", "-1"):
        proxy.fault = once(status("503 Service Unavailable", f"Retry-After: {nonsense}"), 0)
        proxy.requests.clear()
        assert everything(HttpSource(proxy.url, SHORT)) == tiny.all
    proxy.fault = always(status("503 Service Unavailable", "Retry-After: 100"))
    with pytest.raises(DataError, match=r"status 503 Service Unavailable; gave up after 5 s"):
        everything(source)


def test_a_long_outage_is_reported(tiny, proxy, capsys):
    """One line says why nothing happens; a hiccup is only counted."""
    source = HttpSource(proxy.url, replace(SHORT, total_seconds=10))
    proxy.fault = lambda reply: reply.reset() if 1 < reply.number < 6 else reply.send()
    everything(source)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": byte 0: ")[0] for line in lines] == [
        f"{proxy.url}tiny-train-000000.tar"
    ]


def page(reply: Answer) -> None:
    body = b"<html>Please log in</html>"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 26\r\n\r\n"
    reply.send(head=head, body=body)


def whole(reply: Answer) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(reply.body)
    reply.send(head=head)


def field(name: str, value: str) -> Fault:
    """Return the fault of another value in a header field."""

    def fault(reply: Answer) -> None:
        line = re.compile(rf"(?i)\r\n{name}: [^\r]*".encode())
        reply.send(head=line.sub(b"", reply.head)[:-2] + f"{name}: {value}\r\n\r\n".encode())

    return fault


WRONG = {
    "a head that is cut": (cut_in_the_head, "but of no range (no Content-Range)"),
    "a page of a portal": (page, "status 200 OK: a web page, not part of a data set; type: "),
    "the whole file": (whole, "status 200 OK: the server sends no ranges"),
    "not found": (status("404 Not Found"), "status 404 Not Found"),
    "gone": (status("410 Gone"), "status 410 Gone"),
    "forbidden": (status("403 Forbidden"), f"type: export {variables.CERTIFICATE}=FILE"),
    "unauthorized": (status("401 Unauthorized"), f"type: export {variables.CREDENTIALS}=FILE"),
    "shorter there": (status("416 Range Not Satisfiable"), "status 416"),
    "another place": (field("Content-Range", "bytes 512-1023/9999"), "9999 bytes long there"),
    "no place": (field("Content-Range", "bytes */9999"), "but of no range"),
    "to another host": (
        status("302 Found", "Location: http://evil.example/x.tar"),
        "status 302 Found to http://evil.example/x.tar, which is not followed",
    ),
    "to nowhere": (status("302 Found"), "to nowhere"),
    "a number without end": (field("Content-Range", "bytes 0-1/" + "9" * 5000), "of no range (byt"),
    "other digits": (field("Content-Range", "bytes \u00b2-\u00b2/\u00b2"), "of no range"),
    "escapes in its reason": (
        status("418 \x1b[2J\x1b]0;owned\x07"),
        "status 418 \u241b[2J\u241b]0;owned\u2407",
    ),
    "escapes in its place": (
        status("302 Found", "Location: \x1b]0;x\x07"),
        "to \u241b]0;x\u2407, which is not followed",
    ),
    "a reason without end": (status("418 " + "x" * 60_000), "status 418 xxxx"),
    "to another path": (status("307 Moved", "Location: /x.tar"), "to /x.tar, which is not"),
}


def endless(reply: Answer) -> None:
    """Send no length, and zeros behind the range for as long as the client takes them."""
    head = re.sub(rb"(?i)\r\n(content-length|connection): [^\r]*", b"", reply.head)
    reply.send(head=head)
    with contextlib.suppress(OSError):
        for _ in range(1024):
            reply.send(head=b"", body=bytes(1 << 20))
    reply.hang_up()


def test_what_a_server_sends_behind_a_range_is_not_read(tiny, proxy):
    """Without Content-Length, a manifest, an index and shards end where their range does."""
    proxy.fault = endless
    source = HttpSource(proxy.url, SHORT)
    assert everything(source) == tiny.all
    assert source.troubles == 0


@pytest.mark.parametrize(("fault", "text"), WRONG.values(), ids=WRONG)
def test_an_answer_that_cannot_be_right_ends_the_reading(proxy, fault, text):
    """When it comes twice, with URL, byte, status and what to do; nothing wrong is handed out."""
    source = HttpSource(proxy.url, replace(SHORT, total_seconds=60))
    proxy.fault = always(fault)
    with pytest.raises(DataError, match=re.escape(text)) as observed:
        everything(source)
    assert f"{proxy.url}tiny-train-000000.tar: byte 0: " in str(observed.value)
    assert str(observed.value).isprintable() and len(str(observed.value)) < 500
    assert len([line for line in proxy.requests if b"000000.tar" in line]) <= 5


@pytest.mark.parametrize("fault", [page, whole, field("Content-Range", "bytes 512-1023/9999")])
def test_a_wrong_answer_is_asked_for_once_more(tiny, proxy, fault):
    """Bytes on a wire may be wrong once: the run goes on, with every sample."""
    source = HttpSource(proxy.url, replace(SHORT, total_seconds=60))
    proxy.fault = once(fault)
    assert everything(source) == tiny.all
    assert source.troubles == 1
    shard = source.manifest.split("train").shards[1]
    proxy.fault = once(fault, len(proxy.requests))
    assert source.read(shard, 700, 900) == (tiny.folder / shard.name).read_bytes()[700:1600]


def flipped(reply: Answer) -> None:
    body = bytearray(reply.body)
    body[len(body) // 2] ^= 4
    reply.send(body=bytes(body))


@pytest.mark.parametrize("request_number", [0, 1, 2, 3, 4])
def test_a_bit_that_flips_on_the_way_costs_one_more_request(tiny, proxy, request_number):
    """In the manifest, in the index, in any shard, whether read as a stream or by ranges."""
    proxy.fault = once(flipped, request_number)
    assert everything(HttpSource(proxy.url, SHORT)) == tiny.all
    proxy.requests.clear()
    source = HttpSource(proxy.url, SHORT)
    shards, rows = source.manifest.split("train").shards, source.index("train")
    expected = [(shard, rows[rows["shard"] == number]) for number, shard in enumerate(shards)]
    assert [each for part in portions(source, expected) for each in part] == tiny.all
    assert 4 <= len(proxy.requests) <= 7  # a bit that flips between images costs none


def test_a_wrong_address_differs_from_a_server_that_is_down(server):
    """The first answer is waited for only briefly."""
    source = HttpSource("http://127.0.0.1:1/", replace(SHORT, first_seconds=0.5))
    with pytest.raises(DataError, match=r"Connection refused; gave up after 0\.5 s"):
        _ = source.manifest
    with pytest.raises(DataError, match="404 Not Found; is this the folder"):
        _ = HttpSource(server.url + "elsewhere/").manifest


def test_a_source_travels_to_other_processes(tiny, server):
    """By pickle, and through a fork: the child never uses the parent's connections."""
    source = HttpSource(server.url, SHORT)
    assert pickle.loads(pickle.dumps(source)).timeouts == SHORT
    shard = source.manifest.split("train").shards[0]
    source.read(shard, 0, 512)
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:
        result = pool.map(read_all, [source, source])
    assert result == [tiny.all, tiny.all]
    assert source.read(shard, 0, 3) == (tiny.folder / shard.name).read_bytes()[:3]


def read_all(source: Source) -> list[Sample]:
    return everything(source)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("reader:correct horse:battery\n")
    return path


def test_a_password_comes_from_a_file_or_from_netrc(tiny, secret, tmp_path, monkeypatch):
    """Without one the server says 401 and we say what to type."""
    users = tmp_path / "users"
    users.write_text(hashed(secret.read_text()))
    lines = f"auth_basic shards;\nauth_basic_user_file {users};\n"
    with serving_with(tiny.folder, lines, users) as server:
        with pytest.raises(DataError, match=f"401 Unauthorized; .*{variables.CREDENTIALS}=FILE"):
            everything(HttpSource(server.url))
        netrc = tmp_path / "netrc"
        netrc.write_text("default login anonymous password me\n")  # of FTP, and sent to nobody
        monkeypatch.setenv("NETRC", str(netrc))
        with pytest.raises(DataError, match="401 Unauthorized"):
            everything(HttpSource(server.url))
        netrc.write_text('machine 127.0.0.1 login reader password "correct horse:battery"\n')
        assert everything(HttpSource(server.url)) == tiny.all
        monkeypatch.delenv("NETRC")
        monkeypatch.setenv(variables.CREDENTIALS, str(secret))
        assert everything(HttpSource(server.url)) == tiny.all


def test_a_password_never_crosses_a_network_in_the_clear(secret, tmp_path, monkeypatch):
    """Over http:// it goes to this machine only; a file that holds none is named."""
    monkeypatch.setenv(variables.CREDENTIALS, str(secret))
    with pytest.raises(UsageError, match="unencrypted"):
        _ = HttpSource("http://10.1.2.3/").manifest
    monkeypatch.setenv(variables.CREDENTIALS, str(tmp_path / "none"))
    with pytest.raises(UsageError, match="none: No such file"):
        _ = HttpSource("http://127.0.0.1:1/").manifest
    (tmp_path / "none").write_text("no colon")
    with pytest.raises(UsageError, match="must hold one line, user:password"):
        _ = HttpSource("http://127.0.0.1:1/").manifest


def test_tls_is_checked_and_a_certificate_shown_where_one_is_asked_for(tiny, keys, monkeypatch):
    """An unknown authority ends it at once, no certificate is a 400, ours is accepted."""
    client = f"ssl_client_certificate {keys.authority};\nssl_verify_client on;\n"
    with serving_tls(tiny.folder, keys, client) as url:
        with pytest.raises(DataError, match=f"not to be trusted: .*{variables.AUTHORITY}=FILE"):
            _ = HttpSource(url).manifest
        monkeypatch.setenv(variables.AUTHORITY, str(keys.authority))
        with pytest.raises(DataError, match="400 Bad Request"):
            _ = HttpSource(url).manifest
        monkeypatch.setenv(variables.CERTIFICATE, str(keys.client_certificate))
        monkeypatch.setenv(variables.KEY, str(keys.client_key))
        assert everything(HttpSource(url)) == tiny.all
        monkeypatch.setenv(variables.KEY, str(keys.stranger_key))
        with pytest.raises(UsageError, match=variables.CERTIFICATE):
            _ = HttpSource(url).manifest
