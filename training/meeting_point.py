"""Where the members of a group of an elastic run learn which port the group's store has.

    member -> rank 0    the token of the group, from the launcher's order; the member's number
    rank 0 -> member    the port of the store, as soon as rank 0 has one

The port is open on all addresses. Who does not know the token learns nothing, takes no member's
place, and delays no member: all callers are read at the same time.
"""

import hmac
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

TOKEN_BYTES = 16
HELLO = struct.Struct(f">{TOKEN_BYTES}sI")
HELLO_SECONDS = 2.0  # for a connection, and from there to the whole hello
MOST_STRANGERS = 256  # with one more, the oldest is closed; a rank may have 1,024 open files
POLL_SECONDS = 0.2


class MeetingPoint:
    """The port of a rank at which others meet it where it is rank 0."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=1 << 16, dualstack_ipv6=dual
        )
        self._listener.setblocking(False)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Meet nobody any more."""
        self._listener.close()

    def tell(
        self, token: bytes, members: set[int], store_port: int, check: Callable[[], object]
    ) -> None:
        """Tell all these members, as they come, the port of the store; `check` may end that."""
        missing = set(members)
        with _Callers(self._listener, token) as callers:
            while missing:
                check()
                for caller, member in callers.named():
                    with suppress(OSError):
                        caller.sendall(store_port.to_bytes(2, "big"))
                        missing.discard(member)


class _Callers:
    """Connections that have not identified themselves; only those with the token are believed."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener = listener
        self._token = token
        self._received: dict[socket.socket, bytes] = {}  # the oldest first
        self._since: dict[socket.socket, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> "_Callers":
        return self

    def __exit__(self, *reason: object) -> None:
        for caller in [*self._received]:
            self._close(caller)
        self._selector.close()

    def named(self) -> Iterator[tuple[socket.socket, int]]:
        """Yield callers that have come, with the numbers of their members; then close them."""
        for key, _ in self._selector.select(POLL_SECONDS):
            if key.fileobj is self._listener:
                self._accept()
            elif (caller := key.fileobj) in self._received:  # else closed for a newer one
                assert isinstance(caller, socket.socket)
                hello = self._hello(caller)
                if hello is None:
                    continue
                token, member = HELLO.unpack(hello) if hello else (b"", 0)
                if hmac.compare_digest(token, self._token):
                    yield caller, member
                self._close(caller)
        late = time.monotonic() - HELLO_SECONDS
        for caller in [caller for caller, since in self._since.items() if since < late]:
            self._close(caller)

    def _accept(self) -> None:
        with suppress(OSError):
            caller, _ = self._listener.accept()
            caller.setblocking(False)
            self._received[caller], self._since[caller] = b"", time.monotonic()
            self._selector.register(caller, selectors.EVENT_READ)
            if len(self._received) > MOST_STRANGERS:
                self._close(next(iter(self._received)))

    def _hello(self, caller: socket.socket) -> bytes | None:
        # None: there is more to come; empty: the caller has left.
        try:
            data = caller.recv(HELLO.size - len(self._received[caller]))
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._received[caller] += data
        is_whole = len(self._received[caller]) == HELLO.size
        return self._received[caller] if is_whole else None if data else b""

    def _close(self, caller: socket.socket) -> None:
        self._selector.unregister(caller)
        del self._received[caller], self._since[caller]
        caller.close()


def store_port(
    master: tuple[str, int], token: bytes, member: int, check: Callable[[], object]
) -> int:
    """Return the port of a group's store, which its rank 0 tells; `check` may end that."""
    while True:
        with suppress(OSError), socket.create_connection(master, HELLO_SECONDS) as rank_0:
            rank_0.sendall(HELLO.pack(token, member))
            rank_0.settimeout(POLL_SECONDS)
            # Rank 0 answers when it comes to form the group; nothing if it leaves.
            while True:
                check()
                with suppress(TimeoutError):
                    if port := int.from_bytes(rank_0.recv(2), "big"):
                        return port
                    break
        check()
        time.sleep(POLL_SECONDS / 4)
