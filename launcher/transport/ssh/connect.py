"""Connecting and logging in, within time limits; and hanging up."""

import contextlib
import random
import socket
import subprocess
import tempfile
import time
from dataclasses import replace
from functools import partial

import paramiko

from launcher.transport.ssh.failures import translated, was_dropped
from launcher.transport.ssh.protocol import transport_for
from launcher.transport.ssh.route import Proxy, Route

KEEPALIVE_SECONDS = 5
UNACKNOWLEDGED_SECONDS = 15
IDLE_SECONDS = 1.0  # paramiko wakes ten times as often, for each host, to see whether to end
RETRY_SECONDS = 1.0


def open_gateway(gateway: Route) -> None:
    """Open a gateway that is not open, or not any more; hosts behind it find it open."""
    with gateway.opening:
        if not gateway.connection.is_connected:
            translated(open_route, gateway)


def open_route(route: Route) -> None:
    """Connect and log in; a reset or a refusal gets one more try, as sshd drops at random."""
    try:
        _log_in(route)
        return
    except (ConnectionError, EOFError, paramiko.SSHException) as error:
        if not was_dropped(error):
            raise
    time.sleep(RETRY_SECONDS * random.uniform(0.5, 1.5))
    _log_in(route)


def _log_in(route: Route) -> None:
    connection, access = route.connection, route.access
    if route.gateway is not None:  # Fabric would open it with the socket of the first time
        open_gateway(replace(route.gateway, access=access))
    connection.connect_timeout = access.handshake_seconds  # to Fabric, our socket being connected
    connection.connect_kwargs = {
        "banner_timeout": access.banner_seconds,
        "auth_timeout": access.login_seconds,
        "channel_timeout": access.channel_seconds,
        "transport_factory": partial(transport_for, route),
    }
    if route.command:
        connection.connect_kwargs["sock"] = _through_command(route)
    elif route.gateway is None:
        connection.connect_kwargs["sock"] = _dial(route)
    try:
        connection.open()
    finally:
        if not connection.is_connected:
            connection.client.close()
    connection.transport.set_keepalive(KEEPALIVE_SECONDS)
    connection.transport.sock.settimeout(IDLE_SECONDS)


def _dial(route: Route) -> socket.socket:
    sock = _connected(route)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_SECONDS * 1000)
    return sock


def _connected(route: Route) -> socket.socket:
    """A connection to the first of the host's addresses that takes one."""
    address, seconds = (route.connection.host, route.connection.port), route.access.connect_seconds
    if route.family == socket.AF_UNSPEC:
        return socket.create_connection(address, timeout=seconds)
    found = socket.getaddrinfo(*address, route.family, socket.SOCK_STREAM)
    *others, last = [(str(where[0]), address[1]) for *_, where in found]
    for other in others:
        with contextlib.suppress(OSError):
            return socket.create_connection(other, timeout=seconds)
    return socket.create_connection(last, timeout=seconds)


def _through_command(route: Route) -> socket.socket:
    """A socket whose other end is the standard input and output of ssh_config's ProxyCommand."""
    ours, theirs = socket.socketpair()
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - it ends with the network
    with theirs:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {route.command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=complaints,
            start_new_session=True,  # Ctrl-C is for the launcher, which has things to say there
        )
    route.proxies.append(Proxy(process, complaints))
    return ours


def hang_up(route: Route) -> None:
    """Close a connection; its thread is woken, or it would see that only when it is idle."""
    transport = route.connection.transport
    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):  # it broke before
        if transport is not None and isinstance(transport.sock, socket.socket):
            transport.sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
        route.connection.close()


def close_route(route: Route) -> None:
    """Hang up, and end the ProxyCommands on the way."""
    hang_up(route)
    for proxy in route.proxies:
        proxy.end()
