"""Transport through relays: the hosts of a detached run, over connections that they make to us.

A port is open here while a connection is awaited: those of all relays at the start, and one when a
program is started. Only processes with the run's key are accepted, and others delay none of them.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence

from rackrun.launcher.errors import HostLost, HostUnreachable, PreflightRefused
from rackrun.launcher.remote.network import family_of
from rackrun.launcher.remote.sockets import keep_alive, pump, read_line, tls
from rackrun.launcher.transport.local import SocketChannel

CARRIER_SECONDS = 10.0
HANDSHAKE_SECONDS = 10.0
WAITING_CALLERS = 128
MOST_CALLERS = 512  # at once, before they have shown the key; a relay takes milliseconds
PAUSE_SECONDS = 0.05  # when no more connections can be taken


class _Listener:
    """A port whose callers are authenticated, each on a thread of its own."""

    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        """Open a free port at this address; raises OSError."""
        family, backlog = family_of(address), WAITING_CALLERS
        self.listener = socket.create_server((address, 0), family=family, backlog=backlog)
        self.port = int(self.listener.getsockname()[1])
        self.context = context
        self.strangers: dict[socket.socket, None] = {}  # the oldest first
        self.authenticated: queue.SimpleQueue[tuple[str, ssl.SSLSocket]] = queue.SimpleQueue()
        self.closed = False
        threading.Thread(target=self._admit, daemon=True).start()

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def authenticated_until(self, deadline: float) -> Iterator[tuple[str, ssl.SSLSocket]]:
        """Yield callers with the key, each with the token that it sent, as they come."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self.authenticated.get(timeout=max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Accept no more callers."""
        self.closed = True
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        self.listener.close()
        for stranger in list(self.strangers):
            _shut_down(stranger)
        self._send_away()

    def _admit(self) -> None:
        # A thread for each caller: a silent one delays no other. Of too many, the oldest is cut.
        while not self.closed:
            try:
                caller, _ = self.listener.accept()
            except OSError:
                time.sleep(PAUSE_SECONDS)
                continue
            self.strangers[caller] = None
            threading.Thread(target=self._authenticate, args=(caller,), daemon=True).start()
            for oldest in list(self.strangers)[:-MOST_CALLERS]:
                _shut_down(oldest)

    def _authenticate(self, caller: socket.socket) -> None:
        stranger = caller
        try:
            caller.settimeout(HANDSHAKE_SECONDS)
            keep_alive(caller)
            secure = stranger = self.context.wrap_socket(
                caller, server_side=True, do_handshake_on_connect=False
            )
            self.strangers[secure] = None  # so that it can be cut
            secure.do_handshake()
            token = read_line(secure)
            self.strangers.pop(secure, None)  # `close` cuts strangers, and none that is taken
            self.authenticated.put((token, secure))
        except (OSError, ValueError):
            stranger.close()
        finally:
            for one in (caller, stranger):
                self.strangers.pop(one, None)
        if self.closed:  # meanwhile
            self._send_away()

    def _send_away(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.authenticated.get_nowait()[1].close()


class RelayListener:
    """Waits at an address for the relays of a run."""

    def __init__(self, address: str, key: str) -> None:
        """Open a free port; raises PreflightRefused where the address is not this host's."""
        self.address = address
        self.context = tls(key, server=True)
        try:
            self.callers = _Listener(address, self.context)
        except OSError as error:
            advice = "one of its own (ip address) that the other hosts reach"
            hint = f"type in hosts.txt after this host: address=ADDRESS, {advice}"
            raise PreflightRefused(f"{address}: {error.strerror}; {hint}") from error

    @property
    def port(self) -> int:
        """Return the port that the relays connect to."""
        return self.callers.port

    def gather(
        self, names: Sequence[str], tokens: Sequence[str], seconds: float
    ) -> list[RelayTransport]:
        """Return a transport per token, in their order; raise HostUnreachable for missing ones."""
        controls: dict[str, ssl.SSLSocket] = {}
        with self.callers:
            callers = self.callers.authenticated_until(time.monotonic() + seconds)
            while not controls.keys() >= set(tokens) and (caller := next(callers, None)):
                token, control = caller
                if token in tokens and token not in controls:
                    controls[token] = control
                else:
                    control.close()
        missing = [name for name, token in zip(names, tokens, strict=True) if token not in controls]
        if missing:
            where = f"the first host at {self.address}"
            raise HostUnreachable(
                "\n".join(f"{name}: could not connect to {where}" for name in missing)
            )
        return [
            RelayTransport(name, controls[token], self.address, self.context)
            for name, token in zip(names, tokens, strict=True)
        ]


class RelayTransport:
    """A host whose relay starts programs for us, as sshd would."""

    def __init__(
        self, name: str, control: ssl.SSLSocket, address: str, context: ssl.SSLContext
    ) -> None:
        self._name = name
        self._control = control
        self._address = address
        self._context = context

    @property
    def name(self) -> str:
        """Return the host's label."""
        return self._name

    def open(self, argv: Sequence[str]) -> SocketChannel:
        """Have a program started, and accept its connection; raise HostLost when none comes."""
        token = secrets.token_hex(16)
        try:
            with _Listener(self._address, self._context) as callers:
                order = {"port": callers.port, "token": token, "argv": list(argv)}
                self._control.sendall(json.dumps(order).encode() + b"\n")
                secure = _accept(callers, token)
        except OSError as error:
            raise HostLost(f"{self._name}: its relay does not answer: {error}") from error
        ours, theirs = socket.socketpair()
        threading.Thread(target=pump, args=(secure, theirs), daemon=True).start()
        return SocketChannel(ours)

    def close(self) -> None:
        """End the relay, by closing its control connection."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()


def _accept(callers: _Listener, token: str) -> ssl.SSLSocket:
    for shown, secure in callers.authenticated_until(time.monotonic() + CARRIER_SECONDS):
        if secrets.compare_digest(shown.encode(), token.encode()):
            secure.settimeout(None)
            return secure
        secure.close()
    raise TimeoutError(f"no connection within {CARRIER_SECONDS:g} s")


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # a TLS shutdown could block
