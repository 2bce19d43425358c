"""Host certificates: an authority's word about a key, read from the bytes that a host shows."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

CERTIFICATE = "-cert-v01@openssh.com"
"""How the type of a certificate ends."""

KEY_FIELDS = {"ssh-ed25519": 1, "ssh-rsa": 2, "ecdsa-sha2-nistp256": 2}
KEY_FIELDS |= {"ecdsa-sha2-nistp384": 2, "ecdsa-sha2-nistp521": 2}
"""Of how many fields a public key of a type is made."""

HOST_CERTIFICATE = 2
UNSAFE_SIGNATURES = ("ssh-rsa", "ssh-dss")  # SHA-1


@dataclass(frozen=True)
class Certificate:
    """An authority's word that a key belongs to some names for some time."""

    key: bytes
    """The plain key."""
    kind: int
    names: tuple[str, ...]
    after: int
    before: int
    critical: bytes
    """Options that whoever does not know them must not pass over."""
    authority: bytes
    signed: bytes
    signature: bytes
    scheme: str
    """How it is signed."""

    def speaks_for(self, name: str, now: float) -> bool:
        """Whether it is for this host at this time, its signature apart."""
        named = not self.names or name.lower() in self.names
        is_plain = not self.critical and self.scheme not in UNSAFE_SIGNATURES
        return (
            self.kind == HOST_CERTIFICATE and named and is_plain and self.after <= now < self.before
        )


def certificate_of(blob: bytes) -> Certificate | None:
    """A host certificate from its bytes; None for what is none, or of a type that is not known."""
    try:
        kind, at = _string(blob, 0)
        plain = kind.decode("ascii").removesuffix(CERTIFICATE)
        _, start = _string(blob, at)  # the nonce
        at = start
        for _ in range(KEY_FIELDS[plain]):
            _, at = _string(blob, at)
        key = packed(plain.encode()) + blob[start:at]
        _, use = struct.unpack_from(">QI", blob, at)
        _, at = _string(blob, at + 12)  # its name
        names, at = _string(blob, at)
        after, before = struct.unpack_from(">QQ", blob, at)
        critical, at = _string(blob, at + 16)
        _, at = _string(blob, at)  # extensions
        _, at = _string(blob, at)  # reserved
        authority, signed = _string(blob, at)
        signature, _ = _string(blob, signed)
        scheme = _string(signature, 0)[0].decode("ascii")
        listed = tuple(_all_strings(names))
    except (KeyError, UnicodeDecodeError, struct.error):
        return None
    signed_part = blob[:signed]
    return Certificate(
        key, use, listed, after, before, critical, authority, signed_part, signature, scheme
    )


def _string(data: bytes, at: int) -> tuple[bytes, int]:
    """The length-prefixed string at a place, and the place behind it."""
    (length,) = struct.unpack_from(">I", data, at)
    end = at + 4 + length
    if end > len(data):
        raise struct.error("cut off")
    return data[at + 4 : end], end


def _all_strings(data: bytes) -> Iterator[str]:
    at = 0
    while at < len(data):
        text, at = _string(data, at)
        yield text.decode()


def packed(data: bytes) -> bytes:
    """Return a string with its length before it, as all formats of SSH have it."""
    return struct.pack(">I", len(data)) + data
