"""The SSH protocol of a connection: the algorithms that may be used, and why the host hung up.

`ssh -G` prints each list of algorithms as ssh_config and the system's policy leave it. What
paramiko supports of a list is offered, except what is weak (CBC, 3DES, MD5 and SHA-1).
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import paramiko

from rackrun.errors import UsageError
from rackrun.launcher.transport.ssh.openssh import ClientSettings
from rackrun.terminal import one_line

LISTS = {
    "ciphers": "Ciphers",
    "digests": "MACs",
    "kex": "KexAlgorithms",
    "key_types": "HostKeyAlgorithms",
}
"""Attribute of paramiko's security options -> option of ssh_config."""
WEAK = re.compile(r".*-cbc|hmac-(sha1|md5).*|.*-sha1")
ALIASES = {"curve25519-sha256": "curve25519-sha256@libssh.org"}  # which paramiko does not know
RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")
NEW_KEYS_BYTES = 1 << 29
"""After this many bytes paramiko exchanges keys again; it has no time limit."""
UNSUPPORTED = {  # option -> the value that restricts nothing
    "KnownHostsCommand": "none",
    "CheckHostIP": "no",
    "RefuseConnection": "none",
    "RevokedHostKeys": "none",
}
INSTEAD = {
    "RevokedHostKeys": "; mark keys @revoked in known_hosts, and write: RevokedHostKeys none"
}
DISCONNECT = re.compile(r"Disconnect \(code (\d+)\): (.*)", re.DOTALL)
_numbers = itertools.count()


def refuse_unsupported(settings: ClientSettings) -> None:
    """Raise UsageError where ssh_config forbids what a login needs, or asks for what we cannot."""
    algorithms(settings)
    for option in ("IdentityFile", "CertificateFile", "IdentityAgent"):
        for value in settings.all(option.lower()):
            if not re.fullmatch(r"\$\w+", value):  # of IdentityAgent, a variable
                settings.path(option, value)
    where = f"ssh_config, for {settings.name}"
    if settings.first("pubkeyauthentication") in ("no", "false"):
        raise UsageError(f"{where}: PubkeyAuthentication no; rackrun logs in with keys only")
    ways = settings.first("preferredauthentications")
    if ways and "publickey" not in ways.split(","):
        hint = "rackrun logs in with keys only"
        raise UsageError(f"{where}: PreferredAuthentications {ways} has no publickey; {hint}")
    for option, nothing in UNSUPPORTED.items():
        if (settings.first(option.lower()) or nothing) != nothing:
            unsafe = f"{option} is not supported, and ignoring it would be unsafe"
            raise UsageError(f"{where}: {unsafe}{INSTEAD.get(option, '')}")
    size, seconds = (settings.words("rekeylimit") or ["0", "0"])[:2]
    if int(seconds) or 0 < int(size) < NEW_KEYS_BYTES:
        most = "keys are renewed every 512 MB, at no other size or time"
        raise UsageError(f"{where}: RekeyLimit {size} {seconds} is not supported: {most}")


@functools.cache
def _supported() -> Mapping[str, Sequence[str]]:
    """Return what paramiko supports and is not weak: attribute of its security options -> names."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        options = paramiko.Transport(ours).get_security_options()
        return {
            attribute: [name for name in getattr(options, attribute) if not WEAK.fullmatch(name)]
            for attribute in LISTS
        }


def algorithms(settings: ClientSettings) -> dict[str, list[str]]:
    """Return the algorithms to offer to a host: attribute of paramiko's security options -> names.

    Raises UsageError where ssh_config allows none that is supported.
    """
    offered = {}
    for attribute, option in LISTS.items():
        listed = settings.words(option.lower())
        allowed = {*listed, *(ALIASES[name] for name in listed if name in ALIASES)}
        supported = _supported()[attribute]
        offered[attribute] = [name for name in supported if name in allowed]
        if not offered[attribute]:
            none = f"{','.join(listed)} allows none of those supported: {', '.join(supported)}"
            raise UsageError(f"ssh_config, for {settings.name}: {option} {none}")
    return offered


def transport_over(
    sock: Any, settings: ClientSettings, known_types: Sequence[str]
) -> paramiko.Transport:
    """Return the protocol over a connection, which asks for host keys of a known type first.

    Otherwise a known host might show another of its keys, and count as unknown.
    """
    connection: Any = _GatewayChannel(sock) if isinstance(sock, paramiko.Channel) else sock
    transport = paramiko.Transport(connection)
    options = transport.get_security_options()
    for attribute, offered in algorithms(settings).items():
        setattr(options, attribute, offered)
    first = [name for kind in known_types for name in signatures(kind)]
    options.key_types = sorted(options.key_types, key=lambda name: name not in first)
    accepted = settings.words("pubkeyacceptedalgorithms")
    unaccepted = [name for name in transport.preferred_pubkeys if name not in accepted]
    transport.disabled_algorithms = {"pubkeys": unaccepted}
    channel = f"paramiko.rackrun{next(_numbers)}"
    transport.set_log_channel(channel)
    logging.getLogger(channel).setLevel(logging.INFO)
    logging.getLogger(channel).addHandler(_DisconnectReason())
    return transport


def signatures(key_type: str) -> tuple[str, ...]:
    """Return the algorithms by which a key of this type may sign."""
    return RSA_SIGNATURES if key_type == "ssh-rsa" else (key_type,)


def reason_of_disconnect(transport: paramiko.Transport) -> str:
    """Return why the host ended the connection; empty where it just broke."""
    handlers = logging.getLogger(transport.get_log_channel()).handlers
    return next((each.reason for each in handlers if isinstance(each, _DisconnectReason)), "")


class _DisconnectReason(logging.Handler):
    """Keeps the reason of a disconnect, which paramiko only logs."""

    reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Look at a line of the log."""
        if match := DISCONNECT.fullmatch(record.getMessage()):
            self.reason = one_line(match[2]) or f"reason {match[1]}"


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
