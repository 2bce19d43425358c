"""The program on a host of a detached run: it starts programs for the controller, as sshd would.

    controller ──control──▶ relay ──▶ one carrier per program ──▶ agent, probe, transfer
               ◀────────── a connection for each program ─────────

It calls the controller, answers that this worked, and leaves the SSH session that brought it. All
connections are made from here, so nothing listens on this host; they are TLS with the run's own key
on both sides, which came over SSH. When the control connection ends, the relay ends, and every
program sees the end of its standard input. The carriers end with it, whatever ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys

from rackrun.launcher.remote import service
from rackrun.launcher.remote.processes import PR_SET_NAME, PR_SET_PDEATHSIG, open_null, prctl
from rackrun.launcher.remote.sockets import keep_alive, memory_file, pump, read_line, tls

CALL_SECONDS = 10.0


def serve() -> None:
    """Take the one order, call the controller, answer how that went, and stay as a daemon."""
    service.announce()
    sys.stdout.buffer.flush()
    order = service.read_order()
    if not order:
        return
    try:
        context = tls(order["key"], server=False)
        control = call(context, order["address"], order["port"], order["token"])
    except OSError as error:
        service.reply({"error": str(error.strerror or error)})
        return
    service.reply({})
    if os.fork() == 0:
        # Leave the session and the streams of SSH, which ends when nothing holds them.
        os.setsid()
        with open_null() as null:
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
        prctl(PR_SET_NAME, f"rackrun{order['run']}".encode())  # for people who look at `ps`
        memory_file(f"rackrun{order['run']}")  # by which `stop` finds this process and its children
        stay(context, order["address"], control)
    os._exit(0)


def stay(context: ssl.SSLContext, address: str, control: ssl.SSLSocket) -> None:
    """Start what the controller asks for, until its connection ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: the kernel reaps the carriers
    relay = os.getpid()
    with contextlib.suppress(OSError, ValueError):
        while True:
            order = json.loads(read_line(control))
            if os.fork() == 0:
                prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
                if os.getppid() != relay:  # it died before that, and no signal will come
                    os._exit(1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(control.detach())  # the parent's: a TLS close would end it for both
                with contextlib.suppress(OSError):
                    carry(call(context, address, order["port"], order["token"]), order["argv"])
                os._exit(0)


def carry(secure: ssl.SSLSocket, argv: list[str]) -> None:
    """Start a program, and connect its standard input and output until it ends."""
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
        except OSError as error:
            secure.sendall(f"{argv[0]}: {error.strerror}\n".encode())
            return
    pump(secure, ours)


def call(context: ssl.SSLContext, address: str, port: int, token: str) -> ssl.SSLSocket:
    """Connect to the controller and send the token by which it knows the caller."""
    plain = socket.create_connection((address, port), timeout=CALL_SECONDS)
    keep_alive(plain)
    secure = context.wrap_socket(plain)
    secure.sendall(f"{token}\n".encode())
    secure.settimeout(None)
    return secure
