"""known_hosts: which host keys we know, and what a key that a host shows is worth.

    verdict     there is, under the host's name,        and then
    known       this very key                           we go on
    unknown     no key at all                           refused; `--accept-new` records it
    changed     another key, of whatever type           refused, always
    revoked     this key, marked @revoked               refused, always

Names are looked up as `ssh` does it: `host`, or `[host]:port` where the port is not 22 (and then
`host`, if that line has the very key); plain, hashed (`|1|salt|hash`) and with `*`, `?` and `!`.
A host certificate makes its key known when it is signed by an authority of that name
(`@cert-authority`), and valid for it now; otherwise its plain key is judged, as ssh does it.
"""

import base64
import binascii
import fcntl
import fnmatch
import functools
import hashlib
import hmac
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["known", "unknown", "changed", "revoked"]

STANDARD_PORT = 22
REVOKED, AUTHORITY = "@revoked", "@cert-authority"

CERTIFICATE = "-cert-v01@openssh.com"
"""How the type of a certificate ends."""

KEY_FIELDS = {"ssh-ed25519": 1, "ssh-rsa": 2, "ecdsa-sha2-nistp256": 2}
KEY_FIELDS |= {"ecdsa-sha2-nistp384": 2, "ecdsa-sha2-nistp521": 2}
"""Of how many fields a public key of a type is made."""

HOST_CERTIFICATE = 2
UNSAFE_SIGNATURES = ("ssh-rsa", "ssh-dss")  # SHA-1


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file."""

    names: str
    type: str
    blob: bytes
    file: Path
    line: int
    marker: str = ""
    """@revoked, @cert-authority, or nothing."""

    @property
    def revoked(self) -> bool:
        """Whether this key is never to be trusted."""
        return self.marker == REVOKED


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


@dataclass(frozen=True)
class Opinion:
    """What is known about a host's key, and the lines that say so."""

    verdict: Verdict
    lines: tuple[KnownKey, ...] = ()


class KnownHosts:
    """The lines of some known_hosts files, by name."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Read the files that exist; lines that make no sense are passed over, as ssh does it."""
        self._plain: dict[str, list[KnownKey]] = {}
        self._patterns: list[KnownKey] = []
        self._found: dict[str, list[KnownKey]] = {}
        for file in files:
            for known in _lines(file):
                self._add(known)

    def types(self, name: str, port: int) -> tuple[str, ...]:
        """The key types known for a host: to be asked for first, so that one of them is shown."""
        entries = _entry(name, port), _entry(name, STANDARD_PORT)
        plain = ([k for k in self._lookup(entry) if not k.marker] for entry in entries)
        return tuple(dict.fromkeys(known.type for known in next(filter(None, plain), ())))

    def authorities(self, name: str, port: int) -> tuple[KnownKey, ...]:
        """The keys that may vouch for a host."""
        found = self._lookup(_entry(name, port)) + self._lookup(name.lower())
        return tuple(known for known in found if known.marker == AUTHORITY)

    def vouched(self, name: str, port: int, certificate: Certificate, now: float) -> bool:
        """Whether an authority that is known, and not revoked, vouches; its signature apart."""
        known = any(line.blob == certificate.authority for line in self.authorities(name, port))
        return known and certificate.speaks_for(name, now)

    def judge(self, name: str, port: int, blob: bytes) -> Opinion:
        """What the key `blob`, shown by the host at this port, is worth."""
        exact = self._lookup(_entry(name, port))
        plain = [known for known in self._lookup(name.lower()) if known.blob == blob]
        plain = [known for known in plain if known.marker != AUTHORITY]
        revoked = tuple(known for known in (*exact, *plain) if known.revoked and known.blob == blob)
        if revoked:
            return Opinion("revoked", revoked)
        trusted = tuple(known for known in exact if not known.marker)
        if plain or any(known.blob == blob for known in trusted):
            return Opinion("known")
        return Opinion("changed", trusted) if trusted else Opinion("unknown")

    def _add(self, known: KnownKey) -> None:
        for name in known.names.split(","):
            if name.startswith("|") or set(name) & set("*?!"):
                self._patterns.append(known)
                return
        for name in known.names.split(","):
            self._plain.setdefault(name.lower(), []).append(known)

    def _lookup(self, entry: str) -> list[KnownKey]:
        if entry not in self._found:  # asked several times, and a hash for each line
            by_pattern = [known for known in self._patterns if _matches(known.names, entry)]
            self._found[entry] = self._plain.get(entry, []) + by_pattern
        return self._found[entry]


def fingerprint(blob: bytes) -> str:
    """A key's SHA-256 fingerprint as ssh and ssh-keygen write it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def certificate_of(blob: bytes) -> Certificate | None:
    """A host certificate from its bytes; None for what is none, or of a type that is not known."""
    try:
        kind, at = _string(blob, 0)
        plain = kind.decode("ascii").removesuffix(CERTIFICATE)
        _, start = _string(blob, at)  # the nonce
        at = start
        for _ in range(KEY_FIELDS[plain]):
            _, at = _string(blob, at)
        key = _packed(plain.encode()) + blob[start:at]
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


def known_hosts_line(name: str, port: int, key_type: str, blob: bytes, hashed: bool = False) -> str:
    """The line that makes this key known."""
    entry = _entry(name, port)
    if hashed:
        salt = os.urandom(20)
        entry = "|1|" + "|".join(map(_base64, (salt, _name_hash(salt, entry))))
    return f"{entry} {key_type} {_base64(blob)}"


def record(file: Path, line: str) -> None:
    """Append a line to a known_hosts file, one writer at a time, each on a line of its own."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file.open("a+b") as appending:
        fcntl.flock(appending, fcntl.LOCK_EX)  # closing the file gives it back
        size = appending.seek(0, os.SEEK_END)
        appending.seek(max(size - 1, 0))
        separator = "" if appending.read() in (b"", b"\n") else "\n"
        appending.write(f"{separator}{line}\n".encode())


def _entry(name: str, port: int) -> str:
    return name.lower() if port == STANDARD_PORT else f"[{name.lower()}]:{port}"


def _lines(file: Path) -> list[KnownKey]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    numbered = enumerate(text.splitlines(), start=1)
    return [known for number, line in numbered if (known := _known(line, file, number))]


def _known(line: str, file: Path, number: int) -> KnownKey | None:
    words = line.split()
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if len(words) < 3 or words[0].startswith("#") or marker not in ("", REVOKED, AUTHORITY):
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except binascii.Error:
        return None
    return KnownKey(words[0], words[1], blob, file, number, marker)


def _matches(names: str, entry: str) -> bool:
    found = False
    for name in names.split(","):
        if name.startswith("!") and fnmatch.fnmatchcase(entry, _glob(name[1:])):
            return False
        if name.startswith("|"):
            found = found or _hashed_matches(name, entry)
        else:
            found = found or fnmatch.fnmatchcase(entry, _glob(name))
    return found


def _glob(pattern: str) -> str:
    """The pattern for fnmatch, where ssh knows * and ? but no sets: a bracket is a bracket."""
    return pattern.lower().replace("[", "[[]")


def _hashed_matches(name: str, entry: str) -> bool:
    salt, digest = _hashed(name)
    return bool(salt) and hmac.compare_digest(_name_hash(salt, entry), digest)


@functools.cache
def _hashed(name: str) -> tuple[bytes, bytes]:
    """Salt and digest of a hashed name; empty when they make no sense."""
    fields = name.split("|")
    if len(fields) != 4 or fields[1] != "1":
        return b"", b""
    try:
        salt, digest = (base64.b64decode(field, validate=True) for field in fields[2:])
    except binascii.Error:
        return b"", b""
    return salt, digest


def _name_hash(salt: bytes, entry: str) -> bytes:
    return hmac.digest(salt, entry.encode(), "sha1")  # the file format's choice


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


def _packed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
