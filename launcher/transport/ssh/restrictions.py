"""What ssh_config forbids about a host: followed, or refused by name, but never passed over."""

from collections.abc import Mapping
from dataclasses import dataclass
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

NOT_FOLLOWED = {  # option -> the one word that asks for nothing
    "KnownHostsCommand": "none",
    "CheckHostIP": "no",
    "RefuseConnection": "",
}


@dataclass(frozen=True)
class Policy:
    """The algorithms that may be offered to a host, and the keys that are not to be believed."""

    ciphers: tuple[str, ...] = CIPHERS
    macs: tuple[str, ...] = MACS
    kex: tuple[str, ...] = KEX
    host_keys: str = ""
    """HostKeyAlgorithms as written: their order depends on what is known of the host."""
    authorities: tuple[str, ...] = KEYS
    """How an authority may sign the certificate of a host."""
    rsa_bits: int = 0
    """How long an RSA key has to be."""
    revoked: tuple[Path, ...] = ()
    """RevokedHostKeys: lists of keys, be they text or binary."""

    def host_key_types(self, certified: bool, plain: tuple[str, ...]) -> tuple[str, ...]:
        """Return the algorithms to ask a host for, those with a certificate first if it may help.

        `plain`: those without one, in the order of what is known.
        """
        wanted = chosen(self.host_keys, CERTIFICATES * certified + plain)
        return wanted or chosen(self.host_keys, CERTIFICATES)


def policy_of(name: str, settings: Mapping[str, Any], tokens: Mapping[str, str]) -> Policy:
    """Return what ssh_config forbids about a host; raise UsageError where nothing would be left."""
    where = f"ssh_config, for {name}"
    _refuse(where, settings)

    def said(option: str) -> str:
        return str(settings.get(option.lower()) or "")

    def left(option: str, ours: tuple[str, ...]) -> tuple[str, ...]:
        return offered(option, said(option), ours, where)

    left("HostKeyAlgorithms", CERTIFICATES + KEYS)
    return Policy(
        ciphers=left("Ciphers", CIPHERS),
        macs=left("MACs", MACS),
        kex=left("KexAlgorithms", KEX),
        host_keys=said("HostKeyAlgorithms"),
        authorities=chosen(said("CASignatureAlgorithms"), KEYS),
        rsa_bits=rsa_bits(settings),
        revoked=_revoked(said("RevokedHostKeys"), tokens),
    )


def rsa_bits(settings: Mapping[str, Any]) -> int:
    """Return how long an RSA key has to be, a host's or one of ours."""
    return int(settings.get("requiredrsasize") or settings.get("rsaminsize") or 0)


def _refuse(where: str, settings: Mapping[str, Any]) -> None:
    """Raise UsageError for what forbids the only login there is, and for what is not followed."""
    if settings.get("pubkeyauthentication", "yes") == "no":
        raise UsageError(f"{where}: PubkeyAuthentication no; there is no login here but with keys")
    ways = settings.get("preferredauthentications", "publickey")
    if "publickey" not in ways.split(","):
        hint = "there is no login here but with keys"
        raise UsageError(f"{where}: PreferredAuthentications {ways} has no publickey; {hint}")
    for option, nothing in NOT_FOLLOWED.items():
        value = settings.get(option.lower()) or nothing
        if value.lower() != nothing:
            raise UsageError(f"{where}: {option} is not followed here, and not passed over either")


def _revoked(value: str, tokens: Mapping[str, str]) -> tuple[Path, ...]:
    return () if value.lower() in ("", "none") else tuple(paths("RevokedHostKeys", value, tokens))
