"""The keeper's side of the outposts: hosts as places, over connections that they make to us.

A port is open here while somebody is awaited: all outposts at the start, one carrier when a program
is started. Nobody comes in without the run's key.
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
from collections.abc import Sequence

from launcher.errors import HostLost, HostUnreachable, PreflightRefused
from launcher.local import SocketChannel
from launcher.outpost import hear, pump, tls, watch_over

CARRIER_SECONDS = 10.0
HANDSHAKE_SECONDS = 10.0
WAITING_CALLERS = 128


class Gate:
    """Waits at an address for the outposts of a run."""

    def __init__(self, address: str, key: str) -> None:
        """Open a free port; raises PreflightRefused where the address is not this host's."""
        self.address = address
        self.context = tls(key, server=True)
        try:
            self.listener = listen(address)
        except OSError as error:
            own = "one of its own (ip address) that the other hosts reach"
            hint = f"type in hosts.txt behind this host: address=ADDRESS, {own}"
            raise PreflightRefused(f"{address}: {error.strerror}; {hint}") from error

    @property
    def port(self) -> int:
        """Where the outposts call."""
        return int(self.listener.getsockname()[1])

    def gather(self, names: Sequence[str], words: Sequence[str], seconds: float) -> list[Outpost]:
        """The outposts, in the order of their words; raises HostUnreachable for those missing."""
        callers: queue.SimpleQueue[tuple[str, ssl.SSLSocket]] = queue.SimpleQueue()
        threading.Thread(target=self._admit, args=(callers,), daemon=True).start()
        deadline = time.monotonic() + seconds
        found: dict[str, ssl.SSLSocket] = {}
        with contextlib.suppress(queue.Empty):
            while not found.keys() >= set(words):
                word, control = callers.get(timeout=max(0.0, deadline - time.monotonic()))
                if word in words and word not in found:
                    found[word] = control
                else:
                    control.close()
        self.close()
        missing = [name for name, word in zip(names, words, strict=True) if word not in found]
        if missing:
            where = f"the first host at {self.address}"
            raise HostUnreachable(
                "\n".join(f"{name}: did not get through to {where}" for name in missing)
            )
        return [
            Outpost(name, found[word], self.address, self.context)
            for name, word in zip(names, words, strict=True)
        ]

    def close(self) -> None:
        """Let nobody in any more."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in `accept`
        self.listener.close()

    def _admit(self, callers: queue.SimpleQueue[tuple[str, ssl.SSLSocket]]) -> None:
        """Take calls until the port is closed; each is judged on a thread of its own."""
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self.listener.accept()
                threading.Thread(target=self._judge, args=(caller, callers), daemon=True).start()

    def _judge(
        self, caller: socket.socket, callers: queue.SimpleQueue[tuple[str, ssl.SSLSocket]]
    ) -> None:
        with contextlib.suppress(OSError, ValueError):
            secure = greet(caller, self.context)
            callers.put((hear(secure), secure))


class Outpost:
    """A host whose outpost starts programs for us: a place like those behind SSH."""

    def __init__(
        self, name: str, control: ssl.SSLSocket, address: str, context: ssl.SSLContext
    ) -> None:
        """`address` is ours, `control` the connection that orders go over."""
        self._name = name
        self._control = control
        self._address = address
        self._context = context

    @property
    def name(self) -> str:
        """The host's label."""
        return self._name

    def open(self, argv: Sequence[str]) -> SocketChannel:
        """Have a program started, and take the call of its carrier; raises HostLost."""
        word = secrets.token_hex(16)
        try:
            with listen(self._address) as listener:
                listener.settimeout(CARRIER_SECONDS)
                order = {"port": listener.getsockname()[1], "word": word, "argv": list(argv)}
                self._control.sendall(json.dumps(order).encode() + b"\n")
                secure = self._take_call(listener, word)
        except (OSError, ValueError) as error:
            raise HostLost(f"{self._name}: its outpost does not answer: {error}") from error
        ours, theirs = socket.socketpair()
        threading.Thread(target=pump, args=(secure, theirs), daemon=True).start()
        return SocketChannel(ours)

    def close(self) -> None:
        """Let the outpost go."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()

    def _take_call(self, listener: socket.socket, word: str) -> ssl.SSLSocket:
        """The carrier; who else calls meanwhile is sent away."""
        while True:
            caller, _ = listener.accept()
            with contextlib.suppress(ssl.SSLError, ValueError):
                secure = greet(caller, self._context)
                if secrets.compare_digest(hear(secure), word):
                    secure.settimeout(None)
                    return secure


def listen(address: str) -> socket.socket:
    """A free port at this address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=WAITING_CALLERS)


def greet(caller: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Hold a caller to the run's key."""
    caller.settimeout(HANDSHAKE_SECONDS)
    watch_over(caller)
    return context.wrap_socket(caller, server_side=True)
