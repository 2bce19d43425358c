"""The SSH protocol over a connection: the algorithms offered, and the reason of a disconnect."""

from typing import Any

import paramiko

from launcher.transport.ssh.algorithms import KEYS, signatures
from launcher.transport.ssh.restrictions import Restrictions
from launcher.transport.ssh.route import Route
from rackrun.terminal import one_line


class SshProtocol(paramiko.Transport):
    """Offers what its route's restrictions allow, and remembers why the other side disconnected."""

    restrictions = Restrictions()
    certified = False
    pubkeys = KEYS
    disconnect_reason = ""
    """As the other side sent it; empty where the connection just broke."""

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        """Return the algorithms by which a host may prove its identity."""
        plain = tuple(self._filter_algorithm("keys"))  # type: ignore[attr-defined]
        return self.restrictions.host_key_types(self.certified, plain)

    @property
    def preferred_pubkeys(self) -> tuple[str, ...]:
        """Return the algorithms by which the key that is being tried may sign."""
        return self.pubkeys

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        code, words = message.get_int(), message.get_string().decode(errors="replace")
        self.disconnect_reason = one_line(words) or f"reason {code}"


def protocol_for(route: Route, sock: Any, disabled_algorithms: object = None) -> SshProtocol:
    """Return the protocol for a route, which asks for host keys of a known type first.

    Otherwise a known host might show another of its keys, and count as unknown.
    """
    protocol = SshProtocol(sock)
    protocol.handshake_timeout = (
        2 * route.settings.handshake_seconds
    )  # never reached: Fabric's limit is shorter
    protocol.restrictions = route.restrictions
    protocol.certified = bool(route.known.authorities(route.key_name, route.key_port))
    security = protocol.get_security_options()
    security.ciphers, security.digests = route.restrictions.ciphers, route.restrictions.macs
    security.kex = route.restrictions.kex
    types = route.known.types(route.key_name, route.key_port)
    first = [name for kind in types for name in signatures(kind) if name in KEYS]
    security.key_types = first + [name for name in KEYS if name not in first]
    return protocol
