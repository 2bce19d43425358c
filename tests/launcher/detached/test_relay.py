"""The controller's relay listener: strangers delay nothing, and its key is in no file."""

import json
import os
import queue
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rackrun.launcher.errors import HostLost
from rackrun.launcher.remote.relay import call, carry
from rackrun.launcher.remote.sockets import memory_file, read_line, tls
from rackrun.launcher.transport import relay
from rackrun.launcher.transport.certificate import new_key
from rackrun.launcher.transport.relay import RelayListener, RelayTransport

pytestmark = pytest.mark.filterwarnings(  # `ssl` leaves those to Python that are gone already
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
KEY = new_key("one")
SILENT = 40


def reset(port: int) -> None:
    """Connect, and be gone: what a scan of ports does."""
    scan = socket.create_connection(("127.0.0.1", port))
    scan.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    scan.close()


@contextmanager
def strangers(port: int) -> Iterator[None]:
    """Connect strangers: some reset, some are silent, some send garbage, one byte by byte."""
    enough, opened = threading.Event(), []
    for number in range(SILENT):
        reset(port)
        opened.append(socket.create_connection(("127.0.0.1", port)))
        if number % 4 == 0:
            opened[-1].sendall(b"GET / HTTP/1.0\r\n\r\n")
    dripping = threading.Thread(target=drip, args=(opened[1], enough))
    dripping.start()
    try:
        yield
    finally:
        enough.set()
        dripping.join()
        for stranger in opened:
            stranger.close()


def drip(stranger: socket.socket, enough: threading.Event) -> None:
    """Send the beginning of a handshake, a byte now and then."""
    for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500):
        try:
            stranger.sendall(bytes([byte]))
        except OSError:
            return
        if enough.wait(0.2):
            return


def met() -> tuple[RelayTransport, ssl.SSLSocket]:
    """Return a relay as the controller sees it, and the other end, among strangers."""
    door = RelayListener("127.0.0.1", KEY)
    with ThreadPoolExecutor() as pool:
        gathered = pool.submit(door.gather, ["host"], ["word"], 30)
        with strangers(door.port):
            control = call(tls(KEY, server=False), "127.0.0.1", door.port, "word")
            (transport,) = gathered.result(20)
    return transport, control


def test_strangers_make_no_host_lost():
    """While a carrier is awaited, resets, silence and nonsense come first: it gets in at once."""
    transport, control = met()
    with ThreadPoolExecutor() as pool, control:
        opened = pool.submit(transport.open, ["true"])
        order = json.loads(read_line(control))
        with strangers(order["port"]):
            began = time.monotonic()
            context = tls(KEY, server=False)
            call(context, "127.0.0.1", order["port"], "another word").close()
            carrier = call(context, "127.0.0.1", order["port"], order["token"])
            channel = opened.result(20)
            assert time.monotonic() - began < relay.HANDSHAKE_SECONDS
        carrier.sendall(b"through")
        assert channel.receive() == b"through"
        carrier.close()
        assert channel.receive() == b""
    transport.close()


def test_who_was_taken_is_no_stranger_any_more(monkeypatch):
    """The port is closed in the moment in which the last relay is taken: none of them is cut."""
    closed = threading.Event()

    class Slow(queue.SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put(item)
            closed.wait(20)

    ours = SimpleNamespace(SimpleQueue=Slow, Empty=queue.Empty)
    monkeypatch.setattr(relay, "queue", ours)
    transport, control = met()
    closed.set()
    monkeypatch.setattr(relay, "CARRIER_SECONDS", 0.1)
    with control, pytest.raises(HostLost, match="no connection within"):
        transport.open(["true"])
    transport.close()


def test_of_too_many_strangers_the_oldest_go(monkeypatch):
    """However many say nothing, who has the key gets in."""
    monkeypatch.setattr(relay, "MOST_CALLERS", 5)
    transport, control = met()
    control.close()
    transport.close()


def test_a_carrier_that_never_calls_is_a_lost_host(monkeypatch):
    """With strangers at the port or without, after a time, and by the host's name."""
    monkeypatch.setattr(relay, "CARRIER_SECONDS", 0.5)
    transport, control = met()
    with pytest.raises(
        HostLost, match="host: its relay does not answer: no connection within 0.5 s"
    ):
        transport.open(["true"])
    transport.close()
    control.close()


def test_a_program_that_a_relay_cannot_start_is_named():
    """Its reason arrives as its last words: no login shell is blamed for it."""
    transport, control = met()
    with ThreadPoolExecutor() as pool, control:
        opened = pool.submit(transport.open, ["no-such-python"])
        order = json.loads(read_line(control))
        carrier = call(tls(KEY, server=False), "127.0.0.1", order["port"], order["token"])
        carry(carrier, order["argv"])
        carrier.close()
        assert opened.result(20).receive() == b"no-such-python: No such file or directory\n"
    transport.close()


def test_the_key_of_a_run_is_in_no_file(tmp_path, monkeypatch):
    """Where no file can be made, keys are used all the same: their place is in memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert tls(KEY, server=True).get_ca_certs()
    descriptor = memory_file("mark")
    try:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        assert str(path) == "/memfd:mark (deleted)"
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
