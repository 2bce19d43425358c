"""The SSH protocol over a connection: the algorithms offered, and the reason of a disconnect."""

import socket
from contextlib import suppress
from typing import Any

import paramiko

from rackrun.launcher.transport.ssh.restrictions import KEYS, Restrictions, chosen, signatures
from rackrun.launcher.transport.ssh.route import SshRoute
from rackrun.terminal import one_line


class SshProtocol(paramiko.Transport):
    """Offers what its route's restrictions allow, and remembers why the other side disconnected."""

    restrictions = Restrictions()
    pubkeys = KEYS
    disconnect_reason = ""
    """As the other side sent it; empty where the connection just broke."""

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        """Return the algorithms by which a host may prove its identity."""
        plain = tuple(self._filter_algorithm("keys"))  # type: ignore[attr-defined]
        return chosen(self.restrictions.host_keys, plain)

    @property
    def preferred_pubkeys(self) -> tuple[str, ...]:
        """Return the algorithms by which the key that is being tried may sign."""
        return self.pubkeys

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        code, reason = message.get_int(), message.get_string().decode(errors="replace")
        self.disconnect_reason = one_line(reason) or f"reason {code}"

    def _parse_global_request(self, message: paramiko.Message) -> None:
        super()._parse_global_request(message)  # type: ignore[misc]
        # After a login, sshd announces its other host keys, which we refuse. Its kernel sends
        # nothing more before that is acknowledged (Nagle); ours would wait 40 ms for data to
        # acknowledge it with, in vain.
        if isinstance(self.sock, socket.socket) and hasattr(socket, "TCP_QUICKACK"):  # Linux
            with suppress(OSError):  # the connection broke just now, or leads to a ProxyCommand
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


class _GatewayChannel:
    """A connection through a gateway. To close it is no error where the gateway is gone.

    paramiko's thread would end with the traceback of that error, and leave its waiters asleep.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def close(self) -> None:
        """Close the connection as far as the gateway still can."""
        with suppress(EOFError, OSError):
            self._channel.close()


def protocol_for(route: SshRoute, sock: Any, disabled_algorithms: object = None) -> SshProtocol:
    """Return the protocol for a route, which asks for host keys of a known type first.

    Otherwise a known host might show another of its keys, and count as unknown.
    """
    connection: Any = _GatewayChannel(sock) if isinstance(sock, paramiko.Channel) else sock
    protocol = SshProtocol(connection)
    # Never reached: Fabric's limit is shorter.
    protocol.handshake_timeout = 2 * route.settings.handshake_seconds
    protocol.restrictions = route.restrictions
    security = protocol.get_security_options()
    security.ciphers, security.digests = route.restrictions.ciphers, route.restrictions.macs
    security.kex = route.restrictions.kex
    types = route.known_hosts.types(route.key_name, route.key_port)
    first = [name for kind in types for name in signatures(kind) if name in KEYS]
    security.key_types = first + [name for name in KEYS if name not in first]
    return protocol
