"""known_hosts: judges the key that a host shows.

    status      known_hosts has, for the host's name,   consequence
    known       this key                                accepted
    unknown     no key                                  refused; `--accept-new` records it
    changed     another key, of any type                always refused
    revoked     this key, marked @revoked               always refused

Names are looked up as `ssh` does it: `host`, or `[host]:port` where the port is not 22; plain,
hashed (`|1|salt|hash`) and with `*`, `?` and `!`. Where no line has a key for `[host]:port`, a line
for `host` with the same key makes it known, too.
Certificates of hosts are not asked for, so a line with `@cert-authority` makes no key known.
"""

import base64
import fcntl
import fnmatch
import functools
import hashlib
import hmac
import os
import re
import string
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

KeyStatus = Literal["known", "unknown", "changed", "revoked"]

STANDARD_PORT = 22
REVOKED, AUTHORITY = "@revoked", "@cert-authority"
LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)  # ssh folds nothing else


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file."""

    names: str
    type: str
    blob: bytes
    file: Path
    line: int
    marker: str = ""
    """@revoked, @cert-authority, or empty."""

    @property
    def revoked(self) -> bool:
        """Return whether this key is never to be trusted."""
        return self.marker == REVOKED


@dataclass(frozen=True)
class KeyVerdict:
    """The status of a host's key, and the lines of known_hosts that decide it."""

    status: KeyStatus
    lines: tuple[KnownKey, ...] = ()


class KnownHosts:
    """The lines of some known_hosts files, by name."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Read the files that exist; invalid lines are skipped, as with ssh."""
        self._plain: dict[str, list[KnownKey]] = {}
        self._patterns: list[KnownKey] = []
        self._matching: dict[str, list[KnownKey]] = {}
        for file in files:
            for key in _lines(file):
                self._add(key)

    def types(self, name: str, port: int) -> tuple[str, ...]:
        """Return the key types known for a host, which are to be asked for first."""
        entries = _entry(name, port), _entry(name, STANDARD_PORT)
        plain = ([key for key in self._lookup(entry) if not key.marker] for entry in entries)
        # The bare name counts only where no line has a key for this port.
        return tuple(dict.fromkeys(key.type for key in next(filter(None, plain), ())))

    def authorities(self, name: str, port: int) -> tuple[KnownKey, ...]:
        """Return the lines that would have a certificate of a host accepted."""
        keys = self._lookup(_entry(name, port)) + self._lookup(_lowered(name))
        return tuple(key for key in keys if key.marker == AUTHORITY)

    def verdict_on(self, name: str, port: int, blob: bytes) -> KeyVerdict:
        """Return the verdict on the key `blob` that the host at this port has shown."""
        exact, plain = self._lookup(_entry(name, port)), self._lookup(_lowered(name))
        revoked = tuple(key for key in (*exact, *plain) if key.revoked and key.blob == blob)
        if revoked:
            return KeyVerdict("revoked", revoked)
        trusted = tuple(key for key in exact if not key.marker)
        elsewhere = [key for key in plain if not key.marker]  # counts where `trusted` is none
        if any(key.blob == blob for key in trusted or elsewhere):
            return KeyVerdict("known")
        return KeyVerdict("changed", trusted) if trusted else KeyVerdict("unknown")

    def _add(self, key: KnownKey) -> None:
        if key.names.startswith("|") or set(key.names) & set("*?!"):
            self._patterns.append(key)
            return
        for name in key.names.split(","):
            self._plain.setdefault(_lowered(name), []).append(key)

    def _lookup(self, entry: str) -> list[KnownKey]:
        if entry not in self._matching:  # looked up several times; each hashed line costs an HMAC
            by_pattern = [key for key in self._patterns if _matches(key.names, entry)]
            self._matching[entry] = self._plain.get(entry, []) + by_pattern
        return self._matching[entry]


def fingerprint(blob: bytes) -> str:
    """Return a key's SHA-256 fingerprint as ssh and ssh-keygen write it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def known_hosts_line(name: str, port: int, key_type: str, blob: bytes, hashed: bool = False) -> str:
    """Return the line of known_hosts that makes this key known."""
    entry = _entry(name, port)
    if hashed:
        salt = os.urandom(20)
        entry = "|1|" + "|".join(map(_base64, (salt, _name_hash(salt, entry))))
    return f"{entry} {key_type} {_base64(blob)}"


def record(file: Path, line: str) -> None:
    """Append a line to a known_hosts file, locked against other writers."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file.open("a+b") as appending:
        fcntl.flock(appending, fcntl.LOCK_EX)  # released when the file is closed
        size = appending.seek(0, os.SEEK_END)
        appending.seek(max(size - 1, 0))
        separator = "" if appending.read() in (b"", b"\n") else "\n"
        appending.write(f"{separator}{line}\n".encode())


def _entry(name: str, port: int) -> str:
    return _lowered(name) if port == STANDARD_PORT else f"[{_lowered(name)}]:{port}"


def _lowered(name: str) -> str:
    return name.translate(LOWER)


def _lines(file: Path) -> list[KnownKey]:
    try:
        text = file.read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return []
    # Not splitlines: what else ends a line for it, such as U+2028, may occur in a comment.
    numbered = enumerate(text.split("\n"), start=1)
    return [key for number, line in numbered if (key := _key_of(line, file, number))]


def _key_of(line: str, file: Path, number: int) -> KnownKey | None:
    fields = re.split("[ \t]+", line.partition("\0")[0].strip(" \t\r"))
    marker = fields.pop(0) if fields[0].startswith("@") else ""
    if len(fields) < 3 or fields[0].startswith("#") or marker not in ("", REVOKED, AUTHORITY):
        return None
    names, kind, text = fields[:3]
    try:
        blob = base64.b64decode(text, validate=True)
        written = struct.pack(">I", len(kind)) + kind.encode("ascii")  # a key begins with its type
    except ValueError:  # not Base64, or not ASCII
        return None
    return KnownKey(names, kind, blob, file, number, marker) if blob.startswith(written) else None


def _matches(names: str, entry: str) -> bool:
    if names.startswith("|"):
        salt, digest = _hashed(names)
        return bool(salt) and hmac.compare_digest(_name_hash(salt, entry), digest)
    is_match = False
    for name in names.split(","):
        if name.startswith("!") and fnmatch.fnmatchcase(entry, _glob(name[1:])):
            return False
        is_match = is_match or fnmatch.fnmatchcase(entry, _glob(name))
    return is_match


def _glob(pattern: str) -> str:
    return _lowered(pattern).replace("[", "[[]")  # ssh knows * and ?, but no sets


@functools.cache  # each line is compared with every host that is looked up
def _hashed(name: str) -> tuple[bytes, bytes]:
    fields = name.split("|")
    if len(fields) != 4 or fields[1] != "1":
        return b"", b""
    try:
        salt, digest = (base64.b64decode(field, validate=True) for field in fields[2:])
    except ValueError:  # not Base64, or not ASCII
        return b"", b""
    return salt, digest


def _name_hash(salt: bytes, entry: str) -> bytes:
    # SHA-1 is part of the format.
    return hmac.digest(salt, entry.encode("utf-8", "surrogateescape"), "sha1")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
