"""Connections of a detached run, for both of their ends: TLS, lines, bytes both ways."""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import ssl
from typing import Any

PIECE_BYTES = 1 << 16
WAITING_BYTES = 1 << 18  # in each direction; more stays with the sender
LINE_BYTES = 1 << 16
MFD_CLOEXEC, MFD_NOEXEC_SEAL = 1, 8
UNACKNOWLEDGED_MILLISECONDS = 15000


def tls(key: str, server: bool) -> ssl.SSLContext:
    """Return a context in which both sides show the same certificate and accept no other.

    `key` is the certificate and its private key in PEM.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the key is the run's, not a host's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=key[key.index("-----BEGIN CERTIFICATE") :])
    with open(memory_file("key"), "w") as file:  # load_cert_chain wants a path: on no disk
        file.write(key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def memory_file(name: str) -> int:
    """Open a new file in memory, on no disk and without a path; /proc shows its name."""
    libc = ctypes.CDLL(None, use_errno=True)  # not every build of Python has os.memfd_create
    for flags in (MFD_CLOEXEC | MFD_NOEXEC_SEAL, MFD_CLOEXEC):  # older kernels do not know the seal
        descriptor: int = libc.memfd_create(name.encode(), flags)
        if descriptor >= 0:
            return descriptor
    raise OSError(ctypes.get_errno(), "no file in memory can be made")


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other side is silent; send small things at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # These names are Linux's; a launcher elsewhere imports this module, and connects by SSH alone.
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 3),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    # Keepalive probes are not sent while data waits for an acknowledgement: this covers the rest.
    milliseconds = UNACKNOWLEDGED_MILLISECONDS
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def read_line(secure: ssl.SSLSocket) -> str:
    """Return the next line; raise OSError at the end of the connection."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = secure.recv(1)  # no more: what follows the line is for `pump`
        if not byte or len(line) > LINE_BYTES:
            raise ConnectionError("the other side is gone")
        line += byte
    return line[:-1].decode()


def pump(secure: ssl.SSLSocket, plain: socket.socket) -> None:
    """Carry bytes both ways until one side ends, with all that it has sent; close both."""
    with secure, plain, contextlib.suppress(OSError):
        secure.setblocking(False)
        plain.setblocking(False)
        inward, outward = Flow(secure, plain), Flow(plain, secure)
        while not (inward.done or outward.done):
            moved = inward.move() + outward.move()
            if not moved:
                _wait(inward, outward)


class Flow:
    """One direction of a pump."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.waiting = bytearray()
        self.ended = False

    @property
    def done(self) -> bool:
        """Return True when the source has ended and all of it has arrived."""
        return self.ended and not self.waiting

    @property
    def hungry(self) -> bool:
        """Return True while more may be read from the source."""
        return not self.ended and len(self.waiting) < WAITING_BYTES

    def move(self) -> int:
        """Carry what goes without waiting; return the number of bytes, where an end counts as 1."""
        moved = 0
        if self.hungry:
            data = _attempt(lambda: self.source.recv(PIECE_BYTES))
            if data is not None:
                self.waiting += data
                self.ended = not data
                moved += len(data) or 1
        if self.waiting:
            sent = _attempt(lambda: self.target.send(self.waiting[:PIECE_BYTES])) or 0
            del self.waiting[:sent]
            moved += sent
        return moved


def _attempt(work: Any) -> Any:
    try:
        return work()
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
        return None


def _wait(inward: Flow, outward: Flow) -> None:
    flows = (inward, outward)
    readable = [flow.source for flow in flows if flow.hungry]
    writable = [flow.target for flow in flows if flow.waiting]
    select.select(readable, writable, [])
