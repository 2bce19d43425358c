"""Algorithms: those that we offer, and which of them ssh_config allows.

By default, everything that paramiko supports is offered, except what is weak. A list in ssh_config
replaces ours, or changes it: with `+` in front its algorithms are added, with `-` those that match
are removed, with `^` they come first. Nothing weak is ever offered, so `+` adds nothing.
"""

import fnmatch
from collections.abc import Sequence

import paramiko

from launcher.transport.ssh.host_keys.certificates import CERTIFICATE
from rackrun.errors import UsageError

WEAK = {  # still offered by paramiko: CBC, 3DES, MD5 and SHA-1
    "ciphers": ["aes128-cbc", "aes192-cbc", "aes256-cbc", "3des-cbc"],
    "macs": ["hmac-sha1", "hmac-md5", "hmac-sha1-96", "hmac-md5-96"],
}
ALIASES = {"curve25519-sha256": "curve25519-sha256@libssh.org"}  # which paramiko does not know
RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")


def _offered(kind: str) -> tuple[str, ...]:
    every: Sequence[str] = getattr(paramiko.Transport, f"_preferred_{kind}")
    return tuple(name for name in every if name not in WEAK.get(kind, ()))


CIPHERS, MACS, KEX, KEYS = map(_offered, ("ciphers", "macs", "kex", "keys"))
CERTIFICATES = tuple(f"{name}{CERTIFICATE}" for name in KEYS)


def allowed(written: str, name: str) -> bool:
    """Return whether a list of ssh_config allows one of our algorithms."""
    if not written or written[0] in "+^":
        return True
    if written[0] == "-":
        return not _listed(written[1:], name)
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


def offered(option: str, written: str, ours: Sequence[str], where: str) -> tuple[str, ...]:
    """Return what to offer; raise UsageError when ssh_config allows none of our algorithms."""
    left = chosen(written, ours)
    if not left:
        raise UsageError(
            f"{where}: {option} {written} allows none of those supported: {', '.join(ours)}"
        )
    return left


def signatures(key_type: str) -> tuple[str, ...]:
    """Return the algorithms by which a key of this type may sign."""
    return RSA_SIGNATURES if key_type == "ssh-rsa" else (key_type,)


def _names(written: str) -> list[str]:
    return [ALIASES.get(name, name) for name in written.split(",")]


def _listed(patterns: str, name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split(","))
