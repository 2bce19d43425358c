"""Restrictions in ssh_config, such as lists of algorithms: each is followed or refused by name.

By default, everything that paramiko supports is offered, except what is weak. A list in ssh_config
replaces ours, or changes it: with `+` in front its algorithms are added, with `-` those that match
are removed, with `^` they come first. Nothing weak is ever offered, so `+` adds nothing.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paramiko

from rackrun.errors import UsageError

WEAK = {  # still offered by paramiko: CBC, 3DES, MD5 and SHA-1
    "ciphers": ["aes128-cbc", "aes192-cbc", "aes256-cbc", "3des-cbc"],
    "macs": ["hmac-sha1", "hmac-md5", "hmac-sha1-96", "hmac-md5-96"],
}
ALIASES = {"curve25519-sha256": "curve25519-sha256@libssh.org"}  # which paramiko does not know
RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")


def _offered(kind: str) -> tuple[str, ...]:
    supported: Sequence[str] = getattr(paramiko.Transport, f"_preferred_{kind}")
    return tuple(name for name in supported if name not in WEAK.get(kind, ()))


CIPHERS, MACS, KEX, KEYS = map(_offered, ("ciphers", "macs", "kex", "keys"))

_UNSUPPORTED = {  # option -> the value that restricts nothing
    "KnownHostsCommand": "none",
    "CheckHostIP": "no",
    "RefuseConnection": "",
    "RevokedHostKeys": "none",
}
_INSTEAD = {
    "RevokedHostKeys": "; mark keys @revoked in known_hosts, and write: RevokedHostKeys none"
}
_NEW_KEYS_BYTES = 1 << 29
"""After this many bytes paramiko exchanges keys again, sooner than ssh; it has no time limit."""
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}


@dataclass(frozen=True)
class Restrictions:
    """The algorithms that may be offered to a host."""

    ciphers: tuple[str, ...] = CIPHERS
    macs: tuple[str, ...] = MACS
    kex: tuple[str, ...] = KEX
    host_keys: str = ""
    """HostKeyAlgorithms as written: their order depends on what is known of the host."""
    rsa_bits: int = 0
    """The fewest bits of an RSA key."""


def restrictions_of(name: str, settings: Mapping[str, Any]) -> Restrictions:
    """Return ssh_config's restrictions for a host.

    Raises UsageError where nothing is allowed, where login by key is not, and for a restriction
    that we could not keep.
    """
    where = f"ssh_config, for {name}"
    _refuse_unsupported(where, settings)

    def value(option: str) -> str:
        return str(settings.get(option.lower()) or "")

    def offered(option: str, ours: tuple[str, ...]) -> tuple[str, ...]:
        names = chosen(value(option), ours)
        if not names:
            supported = f"none of those supported: {', '.join(ours)}"
            raise UsageError(f"{where}: {option} {value(option)} allows {supported}")
        return names

    offered("HostKeyAlgorithms", KEYS)
    return Restrictions(
        ciphers=offered("Ciphers", CIPHERS),
        macs=offered("MACs", MACS),
        kex=offered("KexAlgorithms", KEX),
        host_keys=value("HostKeyAlgorithms"),
        rsa_bits=rsa_bits(settings),
    )


def rsa_bits(settings: Mapping[str, Any]) -> int:
    """Return the fewest bits of an RSA key, a host's or our own."""
    return int(settings.get("requiredrsasize") or settings.get("rsaminsize") or 0)


def _refuse_unsupported(where: str, settings: Mapping[str, Any]) -> None:
    if settings.get("pubkeyauthentication", "yes") == "no":
        raise UsageError(f"{where}: PubkeyAuthentication no; rackrun logs in with keys only")
    ways = settings.get("preferredauthentications", "publickey")
    if "publickey" not in ways.split(","):
        hint = "rackrun logs in with keys only"
        raise UsageError(f"{where}: PreferredAuthentications {ways} has no publickey; {hint}")
    for option, nothing in _UNSUPPORTED.items():
        value = settings.get(option.lower()) or nothing
        if value.lower() != nothing:
            unsafe = f"{option} is not supported, and ignoring it would be unsafe"
            raise UsageError(f"{where}: {unsafe}{_INSTEAD.get(option, '')}")
    # A RekeyLimit is kept anyway when it has no time, and its size is not below paramiko's own.
    limit = str(settings.get("rekeylimit") or "default")
    size, *time = limit.lower().split()
    match = re.fullmatch(r"(\d{1,12})([kmg]?)", size)
    is_late = match is not None and int(match[1]) << _UNITS[match[2]] >= _NEW_KEYS_BYTES
    if time not in ([], ["none"]) or not (size == "default" or is_late):
        most = "new keys are made every 512 MB, not sooner and at no time"
        raise UsageError(f"{where}: RekeyLimit {limit} is not supported: {most}")


# -- lists of algorithms


def allowed(written: str, name: str) -> bool:
    """Return whether a list of ssh_config allows one of our algorithms."""
    if not written or written[0] in "+^":
        return True
    if written[0] == "-":
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in written[1:].split(","))
    return name in _names(written)


def chosen(written: str, ours: Sequence[str]) -> tuple[str, ...]:
    """Return our algorithms that a list of ssh_config allows, in its order.

    A list without a sign in front is in the order of preference.
    """
    left = [name for name in ours if allowed(written, name)]
    if not written or written[0] in "+-":
        return tuple(left)
    ranks = {name: rank for rank, name in reversed(list(enumerate(_names(written.lstrip("^")))))}
    return tuple(sorted(left, key=lambda name: ranks.get(name, len(ranks))))


def _names(written: str) -> list[str]:
    return [ALIASES.get(name, name) for name in written.split(",")]


def signatures(key_type: str) -> tuple[str, ...]:
    """Return the algorithms by which a key of this type may sign."""
    return RSA_SIGNATURES if key_type == "ssh-rsa" else (key_type,)
