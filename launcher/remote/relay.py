"""The program on a host of a detached run: it lets the keeper start programs there, as sshd would.

    keeper ──control──▶ outpost ──▶ one carrier per program ──▶ agent, probe, porter
           ◀────────── a connection for each program ─────────

It arrives over standard input as the agent does, needs only the standard library of Python 3.8,
calls the keeper, says that it got through, and lets go of the SSH session that brought it. All
connections are made from here and are TLS with the run's own key on both sides, which came over
SSH; so nothing listens on this host. When the control connection ends, it ends, and every program
sees the end of its standard input. The carriers end with it, whatever ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
from typing import Any

MARKER = b"\nrackrun outpost 1\n"
"""Comes before the first answer: what a login shell prints before it is noise."""

PIECE_BYTES = 1 << 16
WAITING_BYTES = 1 << 18  # in each direction; more stays with who sends it
CALL_SECONDS = 10.0
WORD_BYTES = 1 << 16
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
MFD_CLOEXEC, MFD_NOEXEC_SEAL = 1, 8
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
UNACKNOWLEDGED_MILLISECONDS = 15000


def serve(source: bytes) -> None:
    """Take the one order, call the keeper, answer how that went, and stay."""
    sys.stdout.buffer.write(MARKER)
    sys.stdout.buffer.flush()
    length = sys.stdin.buffer.readline()
    if not length:
        return
    order = json.loads(sys.stdin.buffer.read(int(length)))
    try:
        context = tls(order["key"], server=False)
        control = call(context, order["address"], order["port"], order["word"])
    except OSError as error:
        answer({"error": str(error.strerror or error)})
        return
    answer({})
    if os.fork() == 0:
        let_go()
        call_oneself(f"rackrun{order['run']}")
        memory_file(f"rackrun{order['run']}")  # a mark that stays open as long as we live
        stay(context, order["address"], control)
    os._exit(0)


def answer(said: dict[str, Any]) -> None:
    """One answer to whoever sent this program."""
    text = json.dumps(said).encode()
    sys.stdout.buffer.write(b"%d\n%s" % (len(text), text))
    sys.stdout.buffer.flush()


def let_go() -> None:
    """Leave the session and the streams of SSH."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def call_oneself(name: str) -> None:
    """Take a name of up to 15 characters, for people who look at `ps`."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def end_with(parent: int) -> None:
    """Let the kernel end us with our parent, also where it is gone already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def stay(context: ssl.SSLContext, address: str, control: ssl.SSLSocket) -> None:
    """Start what the keeper asks for, until its connection ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the carriers
    outpost = os.getpid()
    with contextlib.suppress(OSError, ValueError):
        while True:
            order = json.loads(hear(control))
            if os.fork() == 0:
                end_with(outpost)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(control.detach())  # the parent's: a proper close would end it there
                with contextlib.suppress(OSError):
                    carry(call(context, address, order["port"], order["word"]), order["argv"])
                os._exit(0)


def carry(secure: ssl.SSLSocket, argv: list[str]) -> None:
    """Start a program, and be its standard input and output until it ends."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return
    pump(secure, ours)


# -- what both ends of a connection do


def tls(key: str, server: bool) -> ssl.SSLContext:
    """Both sides show the same certificate and accept no other; `key` is it and its key in PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the key is the run's, not a host's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=key[key.index("-----BEGIN CERTIFICATE") :])
    with open(memory_file("key"), "w") as file:
        file.write(key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def memory_file(name: str) -> int:
    """Open a new file that is on no disk and has no path, only a name that /proc shows."""
    libc = ctypes.CDLL(None, use_errno=True)  # not every build of Python has os.memfd_create
    for flags in (MFD_CLOEXEC | MFD_NOEXEC_SEAL, MFD_CLOEXEC):  # older kernels do not know the seal
        descriptor: int = libc.memfd_create(name.encode(), flags)
        if descriptor >= 0:
            return descriptor
    raise OSError(ctypes.get_errno(), "no file in memory can be made")


def call(context: ssl.SSLContext, address: str, port: int, word: str) -> ssl.SSLSocket:
    """Connect to the keeper, and say the word by which it knows who calls."""
    plain = socket.create_connection((address, port), timeout=CALL_SECONDS)
    watch_over(plain)
    secure = context.wrap_socket(plain)
    secure.sendall(f"{word}\n".encode())
    secure.settimeout(None)
    return secure


def watch_over(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other side is silent; send small things at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    milliseconds = UNACKNOWLEDGED_MILLISECONDS
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def hear(secure: ssl.SSLSocket) -> str:
    """One line; raises OSError at the end of the connection."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = secure.recv(1)  # the rest of the record is there already, and stays for the next
        if not byte or len(line) > WORD_BYTES:
            raise ConnectionError("the other side is gone")
        line += byte
    return line[:-1].decode()


def pump(secure: ssl.SSLSocket, plain: socket.socket) -> None:
    """Carry bytes both ways until one side ends; then what is left, and both are closed."""
    with secure, plain, contextlib.suppress(OSError):
        secure.setblocking(False)
        plain.setblocking(False)
        inward, outward = Flow(secure, plain), Flow(plain, secure)
        while not (inward.done or outward.done):
            moved = inward.move() + outward.move()
            if not moved:
                wait(inward, outward)


class Flow:
    """One direction of a pump."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        """Both are sockets that do not block."""
        self.source = source
        self.target = target
        self.waiting = bytearray()
        self.ended = False

    @property
    def done(self) -> bool:
        """Whether the source has ended and all of it has arrived."""
        return self.ended and not self.waiting

    @property
    def hungry(self) -> bool:
        """Whether more may be taken from the source."""
        return not self.ended and len(self.waiting) < WAITING_BYTES

    def move(self) -> int:
        """Take and give what goes without waiting; how many bytes that were, an end being one."""
        moved = 0
        if self.hungry:
            data = attempt(lambda: self.source.recv(PIECE_BYTES))
            if data is not None:
                self.waiting += data
                self.ended = not data
                moved += len(data) or 1
        if self.waiting:
            sent = attempt(lambda: self.target.send(self.waiting[:PIECE_BYTES])) or 0
            del self.waiting[:sent]
            moved += sent
        return moved


def attempt(work: Any) -> Any:
    """What comes of it, or None when it would have to wait."""
    try:
        return work()
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
        return None


def wait(inward: Flow, outward: Flow) -> None:
    """Wait until a flow can move."""
    flows = (inward, outward)
    readable = [flow.source for flow in flows if flow.hungry]
    writable = [flow.target for flow in flows if flow.waiting]
    select.select(readable, writable, [])
