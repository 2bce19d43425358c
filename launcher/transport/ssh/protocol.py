"""The SSH protocol over a connection: which algorithms are offered, and how it was ended."""

from typing import Any

import paramiko

from launcher.transport.ssh.algorithms import KEYS, signatures
from launcher.transport.ssh.restrictions import Policy
from launcher.transport.ssh.route import Route
from rackrun.terminal import one_line


class Transport(paramiko.Transport):
    """Offers what its route's policy leaves, and remembers with which words it was turned away."""

    policy = Policy()
    certified = False
    pubkeys = KEYS
    goodbye = ""
    """The words with which the other side ended the connection; none where it just broke."""

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        """Return how a host may prove who it is."""
        plain = tuple(self._filter_algorithm("keys"))  # type: ignore[attr-defined]
        return self.policy.host_key_types(self.certified, plain)

    @property
    def preferred_pubkeys(self) -> tuple[str, ...]:
        """Return how we may sign with the key that is being tried."""
        return self.pubkeys

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        code, words = message.get_int(), message.get_string().decode(errors="replace")
        self.goodbye = one_line(words) or f"reason {code}"


def transport_for(route: Route, sock: Any, disabled_algorithms: object = None) -> Transport:
    """A transport that asks for a key of a known type first, so that known hosts are recognised."""
    transport = Transport(sock)
    transport.handshake_timeout = 2 * route.access.handshake_seconds  # never: Fabric's is first
    transport.policy = route.policy
    transport.certified = bool(route.known.authorities(route.key_name, route.key_port))
    security = transport.get_security_options()
    security.ciphers, security.digests = route.policy.ciphers, route.policy.macs
    security.kex = route.policy.kex
    types = route.known.types(route.key_name, route.key_port)
    first = [name for kind in types for name in signatures(kind) if name in KEYS]
    security.key_types = first + [name for name in KEYS if name not in first]
    return transport
