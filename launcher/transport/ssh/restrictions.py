"""Restrictions in ssh_config: each is followed or refused by name, never ignored."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.transport.ssh.algorithms import (
    CERTIFICATES,
    CIPHERS,
    KEX,
    KEYS,
    MACS,
    chosen,
    offered,
)
from launcher.transport.ssh.paths import paths
from rackrun.errors import UsageError
from rackrun.light_dataclass import dataclass

_UNSUPPORTED = {  # option -> the value that restricts nothing
    "KnownHostsCommand": "none",
    "CheckHostIP": "no",
    "RefuseConnection": "",
}

_NEW_KEYS_BYTES = 1 << 29
"""After this many bytes paramiko exchanges keys again, sooner than ssh; it has no time limit."""
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}


@dataclass(frozen=True)
class Restrictions:
    """The algorithms that may be offered to a host, and the keys it must not have."""

    ciphers: tuple[str, ...] = CIPHERS
    macs: tuple[str, ...] = MACS
    kex: tuple[str, ...] = KEX
    host_keys: str = ""
    """HostKeyAlgorithms as written: their order depends on what is known of the host."""
    authorities: tuple[str, ...] = KEYS
    """The algorithms by which an authority may sign the certificate of a host."""
    rsa_bits: int = 0
    """The fewest bits of an RSA key."""
    revoked: tuple[Path, ...] = ()
    """RevokedHostKeys: lists of keys, text or binary."""

    def host_key_types(self, certified: bool, plain: tuple[str, ...]) -> tuple[str, ...]:
        """Return the algorithms to ask a host for, those with a certificate first if it may help.

        `plain`: those without one, in the order of what is known.
        """
        algorithms = chosen(self.host_keys, CERTIFICATES * certified + plain)
        return algorithms or chosen(self.host_keys, CERTIFICATES)


def restrictions_of(
    name: str, settings: Mapping[str, Any], tokens: Mapping[str, str]
) -> Restrictions:
    """Return ssh_config's restrictions for a host; raise UsageError where nothing is allowed."""
    where = f"ssh_config, for {name}"
    _refuse(where, settings)

    def value(option: str) -> str:
        return str(settings.get(option.lower()) or "")

    def allowed(option: str, ours: tuple[str, ...]) -> tuple[str, ...]:
        return offered(option, value(option), ours, where)

    allowed("HostKeyAlgorithms", CERTIFICATES + KEYS)
    return Restrictions(
        ciphers=allowed("Ciphers", CIPHERS),
        macs=allowed("MACs", MACS),
        kex=allowed("KexAlgorithms", KEX),
        host_keys=value("HostKeyAlgorithms"),
        authorities=chosen(value("CASignatureAlgorithms"), KEYS),
        rsa_bits=rsa_bits(settings),
        revoked=_revoked(value("RevokedHostKeys"), tokens),
    )


def rsa_bits(settings: Mapping[str, Any]) -> int:
    """Return the fewest bits of an RSA key, a host's or our own."""
    return int(settings.get("requiredrsasize") or settings.get("rsaminsize") or 0)


def _refuse(where: str, settings: Mapping[str, Any]) -> None:
    """Raise UsageError for options that forbid login by key, and for unsupported restrictions."""
    if settings.get("pubkeyauthentication", "yes") == "no":
        raise UsageError(f"{where}: PubkeyAuthentication no; rackrun logs in with keys only")
    ways = settings.get("preferredauthentications", "publickey")
    if "publickey" not in ways.split(","):
        hint = "rackrun logs in with keys only"
        raise UsageError(f"{where}: PreferredAuthentications {ways} has no publickey; {hint}")
    for option, nothing in _UNSUPPORTED.items():
        value = settings.get(option.lower()) or nothing
        if value.lower() != nothing:
            raise UsageError(f"{where}: {option} is not supported, and ignoring it would be unsafe")
    limit = str(settings.get("rekeylimit") or "default")
    if not _new_keys_in_time(limit):
        most = "new keys are made every 512 MB, not sooner and at no time"
        raise UsageError(f"{where}: RekeyLimit {limit} is not supported: {most}")


def _new_keys_in_time(limit: str) -> bool:
    """Return True for a RekeyLimit that is kept anyway: no time, and not before 512 MiB."""
    size, *time = limit.lower().split()
    match = re.fullmatch(r"(\d{1,12})([kmg]?)", size)
    is_late = match is not None and int(match[1]) << _UNITS[match[2]] >= _NEW_KEYS_BYTES
    return time in ([], ["none"]) and (size == "default" or is_late)


def _revoked(value: str, tokens: Mapping[str, str]) -> tuple[Path, ...]:
    return () if value.lower() in ("", "none") else tuple(paths("RevokedHostKeys", value, tokens))
