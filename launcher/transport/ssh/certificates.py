"""Host certificates, parsed from the bytes that a host sends."""

import struct
from dataclasses import dataclass

CERTIFICATE = "-cert-v01@openssh.com"
"""The suffix of a certificate's type."""

KEY_FIELDS = {"ssh-ed25519": 1, "ssh-rsa": 2, "ecdsa-sha2-nistp256": 2}
KEY_FIELDS |= {"ecdsa-sha2-nistp384": 2, "ecdsa-sha2-nistp521": 2}
"""The number of fields of a public key, by type."""

HOST_CERTIFICATE = 2
UNSAFE_SIGNATURES = ("ssh-rsa", "ssh-dss")  # SHA-1


@dataclass(frozen=True)
class Certificate:
    """An authority's statement that a key belongs to some names for some time."""

    key: bytes
    """The plain key."""
    kind: int
    names: tuple[str, ...]
    after: int
    before: int
    critical: bytes
    """Options that an implementation must refuse when it does not know them."""
    authority: bytes
    signed: bytes
    signature: bytes
    scheme: str
    """The signature algorithm."""

    def is_valid_for(self, name: str, now: float) -> bool:
        """Return whether it is valid for this host at this time; its signature is not checked."""
        named = not self.names or name.lower() in self.names
        is_plain = not self.critical and self.scheme not in UNSAFE_SIGNATURES
        return (
            self.kind == HOST_CERTIFICATE and named and is_plain and self.after <= now < self.before
        )


def certificate_of(blob: bytes) -> Certificate | None:
    """Return the certificate in some bytes; None for anything else, or an unknown type.

    The format: https://github.com/openssh/openssh-portable/blob/master/PROTOCOL.certkeys
    """
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
        listed, name_at = [], 0
        while name_at < len(names):
            listed_name, name_at = _string(names, name_at)
            listed.append(listed_name.decode())
    except (KeyError, UnicodeDecodeError, struct.error):
        return None
    signed_part = blob[:signed]
    return Certificate(
        key, use, tuple(listed), after, before, critical, authority, signed_part, signature, scheme
    )


def _string(data: bytes, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from(">I", data, at)  # four bytes before each string
    end = at + 4 + length
    if end > len(data):
        raise struct.error("cut off")
    return data[at + 4 : end], end


def packed(data: bytes) -> bytes:
    """Return a string prefixed with its length, as in all formats of SSH."""
    return struct.pack(">I", len(data)) + data
