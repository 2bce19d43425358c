"""Hosts after login, and the channels of programs that run there."""

import contextlib
import select
import shlex
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import paramiko

from rackrun.launcher.errors import HostLost, HostUnreachable
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.transport.ssh.connect import hang_up, open_route
from rackrun.launcher.transport.ssh.failures import message_of, no_program_message, translated
from rackrun.launcher.transport.ssh.route import COMPLAINT_BYTES, SshRoute
from rackrun.terminal import clean_lines

READ_BYTES = 256 * 1024
WAKE_SECONDS = 5.0
SEND_SECONDS = 1.0
BROKEN = (paramiko.SSHException, EOFError, OSError)
"""The exceptions of paramiko for a connection that is no longer usable."""


class Machine:
    """A host after login: the transport over SSH."""

    def __init__(self, host: Host, route: SshRoute) -> None:
        self.host = host
        self._route = route
        self._short_route = replace(route, settings=route.settings.with_short_timeouts())
        self._used = False

    @property
    def name(self) -> str:
        """Return the host's label."""
        return self.host.label

    @property
    def address(self) -> str:
        """Return the address of the connection; empty through a gateway or a ProxyCommand."""
        sock = self._route.connection.transport.sock
        if isinstance(sock, socket.socket) and sock.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # it just broke: the next `open` reports that
                return str(sock.getpeername()[0])
        return ""

    def open(self, argv: Sequence[str]) -> "SshChannel":
        """Start a program, over a new connection if this one broke.

        So a clean-up reaches a lost host when only its connection was lost.
        """
        first, self._used = not self._used, True
        try:
            return self._start(argv, self._route if first else self._short_route)
        except BROKEN as error:
            if first and self._route.connection.is_connected:
                reason = no_program_message(self._route, error)
                raise HostUnreachable(f"{self.name}: {reason}") from error
        self.close()
        with translated(self._short_route):
            open_route(self._short_route)
        try:
            return self._start(argv, self._short_route)
        except BROKEN as error:
            reason = no_program_message(self._short_route, error)
            raise HostLost(f"{self.name}: {reason}") from error

    def _start(self, argv: Sequence[str], route: SshRoute) -> "SshChannel":
        seconds = route.settings.channel_seconds
        channel = route.connection.transport.open_session(timeout=seconds)
        channel.settimeout(WAKE_SECONDS)
        # SSH has one string for a command, which a shell there splits: nothing else is quoted.
        _execute(channel, shlex.join(argv), seconds)
        return SshChannel(self.name, channel)

    def close(self) -> None:
        """Close the connection, and with it the channel of every program."""
        hang_up(self._route)


class SshChannel:
    """The channel of a program that runs on a host: standard input, output and error."""

    def __init__(self, name: str, channel: paramiko.Channel) -> None:
        self._name = name
        self._channel = channel
        self._errors = b""

    def send(self, data: bytes) -> None:
        """Write all of `data`; raises HostLost when there is no room for a second."""
        deadline = time.monotonic() + SEND_SECONDS
        while data:
            if self._channel.closed or time.monotonic() > deadline:
                raise HostLost(f"{self._name}: the connection accepts no more data")
            if not self._channel.send_ready():
                time.sleep(0.01)
                continue
            try:
                data = data[self._channel.send(data) :]
            except BROKEN as error:
                reason = f"the connection broke: {message_of(error)}"
                raise HostLost(f"{self._name}: {reason}") from error

    def receive(self, seconds: float | None = None) -> bytes:
        """Wait for output; return b"" once the program has ended or the connection broke.

        Raises TimeoutError when there was neither for `seconds`.
        """
        # In slices: what a program writes to standard error meanwhile would fill its window, and
        # stop it.
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = WAKE_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            self._channel.settimeout(min(left, WAKE_SECONDS))
            try:
                data = self._channel.recv(READ_BYTES)
            except TimeoutError:
                data = b""
                if not self._channel.closed:
                    self._drain_errors()
                    if left > WAKE_SECONDS or deadline is None:
                        continue
                    raise
            self._drain_errors()
            return data

    def is_unread(self) -> bool:
        """Return whether bytes or the end lie here, or in the socket of the connection."""
        transport = self._channel.get_transport()
        if self._channel.recv_ready() or self._channel.closed or not transport.is_active():
            return True
        poll = select.poll()  # unlike select, without a limit on descriptors
        if isinstance(transport.sock, socket.socket):
            poll.register(transport.sock, select.POLLIN)
        return bool(poll.poll(0))

    def complaint(self) -> str:
        """Return the end of its standard error and what became of the connection, cleaned."""
        self._drain_errors()
        errors = clean_lines(self._errors.decode(errors="replace").strip())
        broke = self._channel.get_transport().get_exception()
        alive = self._channel.get_transport().is_active()
        link = "" if alive else f"the connection broke ({message_of(broke) if broke else 'closed'})"
        return "\n".join(filter(None, (errors, link)))

    def close(self) -> None:
        """Close both directions."""
        with contextlib.suppress(*BROKEN):  # it broke just now
            self._channel.close()

    def _drain_errors(self) -> None:
        while self._channel.recv_stderr_ready():
            self._errors = (self._errors + self._channel.recv_stderr(READ_BYTES))[-COMPLAINT_BYTES:]


def _execute(channel: paramiko.Channel, command: str, seconds: float) -> None:
    # paramiko itself would wait for the reply without limit.
    late = threading.Event()

    def close_late() -> None:
        late.set()
        with contextlib.suppress(*BROKEN):  # the connection broke meanwhile
            channel.close()

    timer = threading.Timer(seconds, close_late)
    timer.start()
    try:
        channel.exec_command(command)
    except paramiko.SSHException as error:
        raise (TimeoutError() if late.is_set() else error) from None
    finally:
        timer.cancel()
