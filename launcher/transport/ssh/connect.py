"""Opening and closing SSH connections, within time limits."""

import contextlib
import random
import socket
import subprocess
import tempfile
import time
from dataclasses import replace
from functools import partial
from typing import Any

import paramiko

from rackrun.launcher.transport.ssh.failures import translated, was_dropped
from rackrun.launcher.transport.ssh.protocol import transport_over
from rackrun.launcher.transport.ssh.route import Proxy, SshRoute

KEEPALIVE_SECONDS = 5  # paramiko never judges them, but they make the kernel notice a dead link
UNACKNOWLEDGED_SECONDS = 15  # until it does; its own limit is a quarter of an hour
IDLE_SECONDS = 1.0  # paramiko wakes ten times as often, for each host, to see whether to end
RETRY_SECONDS = 1.0


def open_gateway(gateway: SshRoute) -> None:
    """Open a gateway unless it is open; call it before any host that it leads to."""
    with gateway.opening:
        if not gateway.connection.is_connected:
            with translated(gateway):
                open_route(gateway)


def open_route(route: SshRoute) -> None:
    """Connect and log in; after a reset or a refusal try once more, as sshd drops at random."""
    try:
        _log_in(route)
        return
    except (ConnectionError, EOFError, paramiko.SSHException) as error:
        if not was_dropped(error):
            raise
    time.sleep(RETRY_SECONDS * random.uniform(0.5, 1.5))
    _log_in(route)


def _log_in(route: SshRoute) -> None:
    connection, settings = route.connection, route.settings
    known_types = route.host_keys.look_up()
    connection.client.set_missing_host_key_policy(route.host_keys)
    if route.gateway is not None:  # Fabric would reuse the socket of its first connection
        open_gateway(replace(route.gateway, settings=settings))
    connection.connect_timeout = settings.handshake_seconds  # to Fabric, our socket being connected
    connection.connect_kwargs = {
        "banner_timeout": settings.banner_seconds,
        "auth_timeout": settings.login_seconds,
        "channel_timeout": settings.channel_seconds,
        "transport_factory": partial(_protocol, route, known_types),
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


def _protocol(
    route: SshRoute, known_types: list[str], sock: Any, disabled_algorithms: object = None
) -> paramiko.Transport:
    """Return the protocol over a socket, as paramiko asks for one."""
    transport = transport_over(sock, route.client, known_types)
    # Never reached: Fabric's limit is shorter.
    transport.handshake_timeout = 2 * route.settings.handshake_seconds
    return transport


def _dial(route: SshRoute) -> socket.socket:
    host, port = route.connection.host, route.connection.port
    if route.family != socket.AF_UNSPEC:  # `create_connection` tries addresses of any family
        host = str(socket.getaddrinfo(host, port, route.family, socket.SOCK_STREAM)[0][4][0])
    sock = socket.create_connection((host, port), route.settings.connect_seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # not on macOS: a heartbeat is missed there
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_SECONDS * 1000)
    return sock


def _through_command(route: SshRoute) -> socket.socket:
    ours, theirs = socket.socketpair()
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - it ends with the network
    with theirs:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {route.command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=complaints,
            start_new_session=True,  # Ctrl-C is for the launcher, which still needs the connection
        )
    route.proxies.append(Proxy(process, complaints))
    return ours


def hang_up(route: SshRoute) -> None:
    """Close a connection, and wake its thread, which would otherwise notice only when idle."""
    transport = route.connection.transport
    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):  # already broken
        if transport is not None and isinstance(transport.sock, socket.socket):
            transport.sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
        route.connection.close()


def close_route(route: SshRoute) -> None:
    """Close a connection and end its ProxyCommands."""
    hang_up(route)
    for proxy in route.proxies:
        proxy.end()
