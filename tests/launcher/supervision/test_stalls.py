"""Hosts that begin well and then say nothing more: named, wherever they stop, and in time."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.transport.ssh import ConnectSettings, Network
from tests.lab.hosts import BUSY, Lab, Sshd, with_signal

ONE_SECOND = {
    f"{step}_seconds": 1.0 for step in ("connect", "banner", "handshake", "login", "channel")
}


@contextmanager
def network(lab: Lab, **access: float) -> Iterator[Network]:
    """Yield a Network with a second for each step, unless set otherwise."""
    made = Network(ConnectSettings(config=lab.config, **{**ONE_SECOND, **access}))
    try:
        yield made
    finally:
        made.close()


JUDGES_NO_KEY = """\
Match all
  AuthorizedKeysFile none
  AuthorizedKeysCommand /bin/sleep 60
  AuthorizedKeysCommandUser root
"""


class Mute:
    """Between us and a real sshd: lets its banner and a number of its packets through, no more."""

    def __init__(self, server: Sshd, packets: int) -> None:
        self._server, self._packets = server, packets
        self._door = socket.create_server((server.address, 0))
        self._open: list[socket.socket] = [self._door]
        self.visits = 0
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def host(self) -> Host:
        return Host(self._server.address, port=self._door.getsockname()[1])

    def close(self) -> None:
        for sock in self._open:
            sock.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            self.visits += 1
            inner = socket.create_connection((self._server.address, self._server.port))
            self._open += [client, inner]
            threading.Thread(target=self._to_server, args=(client, inner), daemon=True).start()
            message = inner.makefile("rb")
            client.sendall(message.readline())
            for _ in range(self._packets):
                length = message.read(4)
                client.sendall(length + message.read(int.from_bytes(length, "big")))

    def _to_server(self, client: socket.socket, inner: socket.socket) -> None:
        try:
            while data := client.recv(65536):
                inner.sendall(data)
        except OSError:
            pass  # the test is over


@pytest.mark.security("SSH-8")
def test_a_login_that_stalls_is_named_with_the_step_and_in_time(start_lab):
    """SSH-8: after the banner, in the key exchange, and while a key is judged: 69 for all three."""
    start_lab(1)
    lab = start_lab(1, extra=JUDGES_NO_KEY)
    server, slow = lab.hosts
    mutes = [Mute(server, packets) for packets in (0, 1)]
    began = time.monotonic()
    with network(lab) as net, pytest.raises(HostUnreachable) as caught:
        net.connect([server.host, *(mute.host for mute in mutes), slow.host])
    assert time.monotonic() - began < BUSY * 3
    message = str(caught.value).splitlines()
    assert caught.value.exit_code == 69
    assert len(message) == 3
    for mute, line in zip(mutes, message, strict=False):
        assert f"port {mute.host.port} did not finish the SSH handshake within 1 s" in line
        assert mute.visits == 1  # waited for, and not tried again
        mute.close()
    assert f"port {slow.port} neither accepted nor refused a key of" in message[2]
    assert "within 1 s" in message[2]


def test_a_host_that_lets_us_in_and_opens_no_channel_is_named(start_lab):
    """SSH-8: sshd's session stands still after the login; a gateway's does so for those behind."""
    lab = start_lab(3)
    gateway, behind, other = lab.hosts
    lab.configure(f"Host {behind.address}\n  ProxyJump {gateway.line}")
    with network(lab) as net:
        net.connect([behind.host])
        (machine,) = net.connect([other.host])
        stopped = [*gateway.sessions(), *other.sessions()]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(HostUnreachable) as caught:
                machine.open(["true"])
            assert str(caught.value).endswith(
                f"port {other.port} accepted the login, but starts no program: no answer within 1 s"
            )
            with pytest.raises(HostUnreachable, match=r"gateway 127\.0\.0\.2 does not reach"):
                net.connect([behind.host])
            assert time.monotonic() - began < BUSY * 4
        finally:
            for pid in stopped:
                with_signal(pid, signal.SIGCONT)


def test_a_gateway_that_runs_no_programs_is_no_host_for_ranks(start_lab):
    """MaxSessions 0, as on bastions: named with sshd's message; it is no host to train on."""
    lab = start_lab(1, extra="MaxSessions 0\n")
    code, _, err = lab.result_of(lab.cheap_hosts(), "--", "true")
    assert code == 69
    assert "127.0.0.2 port" in err
    assert "accepted the login, but starts no program: " in err
    assert "Traceback" not in err
