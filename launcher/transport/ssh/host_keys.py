"""Host keys: the verdict on the key that a host shows, before anything else is sent.

    known_hosts has, for the host's name       consequence
    this key                                   accepted
    this key, marked @revoked                  refused
    other keys, of any type                    refused: the key has changed
    no key                                     refused; `--accept-new` records it

A host at another port than 22 is looked up as `[host]:port`; where no line has a key for that, the
lines for `host` count: one with the same key makes it known, one with @revoked refuses it, as with
ssh. Certificates of hosts are not asked for, so a line with @cert-authority makes no key known.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import paramiko

from rackrun.launcher.errors import AccessRefused
from rackrun.launcher.transport.ssh.openssh import ClientSettings, KnownKey, known_keys

STANDARD_PORT = 22
ACCEPTING = ("accept-new", "no", "off", "false")
"""Values of StrictHostKeyChecking by which new keys are recorded."""


class HostKeys(paramiko.MissingHostKeyPolicy):
    """What known_hosts has about one host, and the verdict on the key that the host shows.

    paramiko itself is given no known keys, so that it asks about each of them here.
    """

    def __init__(self, label: str, client: ClientSettings, accept_new: bool) -> None:
        files = client.known_hosts("UserKnownHostsFile")
        alias, strict = client.first("hostkeyalias"), client.first("stricthostkeychecking")
        self.label = label
        self.target = f"{client.host} port {client.port}"
        self.name = (alias or client.host).lower()
        self.port = STANDARD_PORT if alias else client.port
        self.files = [*files, *client.known_hosts("GlobalKnownHostsFile")]
        self.record_in = files[0] if files else Path("~/.ssh/known_hosts").expanduser()
        self.accept_new = bool(files) and (accept_new or strict in ACCEPTING)
        self.hash_names = client.first("hashknownhosts") == "yes"
        self.rsa_bits = int(client.first("requiredrsasize") or 0)
        self.at_port: list[KnownKey] = []
        """The lines about the host at its port."""
        self.by_name: list[KnownKey] = []
        """Those about its name, where the others give no key."""

    def look_up(self) -> list[str]:
        """Ask known_hosts about the host; return the types of key that are known at its port."""
        self.at_port, self.by_name = known_keys(self.entry, self.files), []
        types = [line.type for line in self.at_port if not line.marker]
        if self.port != STANDARD_PORT and not types:
            self.by_name = known_keys(self.name, self.files)
        return types

    @property
    def entry(self) -> str:
        """Return the host's name as a line of known_hosts has it."""
        return self.name if self.port == STANDARD_PORT else f"[{self.name}]:{self.port}"

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        """Return when the key is known or may be recorded; raise AccessRefused otherwise."""
        if key.get_name() == "ssh-rsa" and key.get_bits() < self.rsa_bits:
            bits = f"{key.get_bits()} bits, RequiredRSASize {self.rsa_bits}"
            raise AccessRefused(f"{self.label}: the host key of {self.target} is too short: {bits}")
        lines, blob = [*self.at_port, *self.by_name], key.asbytes()
        same = [line for line in lines if line.blob == blob and line.marker != "CA"]
        if revoked := [line for line in same if line.marker == "REVOKED"]:
            raise AccessRefused(_revoked_key(self, revoked[0], key))
        if same:
            return
        _refuse_other_keys(self, self.at_port, key)
        if not self.accept_new:
            raise AccessRefused(_unknown_key(self, lines, key))
        try:
            _record(self, key)
        except OSError as error:
            reason = f"cannot be recorded in {self.record_in}: {error.strerror}"
            raise AccessRefused(f"{self.label}: its host key {reason}") from error


def fingerprint(blob: bytes) -> str:
    """Return a key's SHA-256 fingerprint as ssh and ssh-keygen write it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def _line(entry: str, key: paramiko.PKey, is_hashed: bool = False) -> str:
    """Return the line of known_hosts that makes this key known."""
    if is_hashed:
        salt = os.urandom(20)
        digest = hmac.digest(salt, entry.encode(), "sha1")  # SHA-1 is part of the format
        entry = "|1|" + "|".join(base64.b64encode(part).decode() for part in (salt, digest))
    return f"{entry} {key.get_name()} {key.get_base64()}"


def _record(keys: HostKeys, key: paramiko.PKey) -> None:
    """Append a host's key to its known_hosts file, unless another connection has just done so."""
    file = keys.record_in
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file.open("a+b") as appending:
        fcntl.flock(appending, fcntl.LOCK_EX)  # released when the file is closed
        known = known_keys(keys.entry, [file])
        if any(line.blob == key.asbytes() for line in known):
            return
        _refuse_other_keys(keys, known, key)
        size = appending.seek(0, os.SEEK_END)
        appending.seek(max(size - 1, 0))
        separator = "" if appending.read() in (b"", b"\n") else "\n"
        line = _line(keys.entry, key, keys.hash_names)
        appending.write(f"{separator}{line}\n".encode())


def _refuse_other_keys(keys: HostKeys, known: Sequence[KnownKey], key: paramiko.PKey) -> None:
    if others := [line for line in known if not line.marker]:
        raise AccessRefused(_changed_key(keys, others[0], key))


def _unknown_key(keys: HostKeys, lines: Sequence[KnownKey], key: paramiko.PKey) -> str:
    authorities = [line for line in lines if line.marker == "CA"]
    certified = ""
    if authorities:
        line_of_authority = f"{authorities[0].file}:{authorities[0].line}"
        certified = f"; @cert-authority ({line_of_authority}) is not supported, only keys are"
    line = _line(keys.entry, key)
    return (
        f"{keys.label}: the host key of {keys.target} is not known{certified}\n"
        f"    shown    {_shown(key)}\n"
        f"    compare it on that host with: ssh-keygen -lf {_key_file(key.get_name())}\n"
        f"    then type: echo {shlex.quote(line)} >> {shlex.quote(str(keys.record_in))}\n"
        f"    or, to trust every new host at first sight, add --accept-new"
    )


def _revoked_key(keys: HostKeys, line: KnownKey, key: paramiko.PKey) -> str:
    return (
        f"{keys.label}: the host key of {keys.target} is revoked\n"
        f"    shown    {_shown(key)}\n"
        f"    revoked  {line.file}:{line.line}; give the host a new key"
    )


def _changed_key(keys: HostKeys, line: KnownKey, key: paramiko.PKey) -> str:
    return (
        f"{keys.label}: the host key of {keys.target} has CHANGED: a new machine, or an"
        " attacker in between\n"
        f"    known    {fingerprint(line.blob)} ({line.type}, {line.file}:{line.line})\n"
        f"    shown    {_shown(key)}\n"
        f"    compare it on that host with: ssh-keygen -lf {_key_file(key.get_name())}\n"
        f"    then type: ssh-keygen -f {shlex.quote(str(line.file))} -R {shlex.quote(keys.entry)}"
    )


def _shown(key: paramiko.PKey) -> str:
    return f"{fingerprint(key.asbytes())} ({key.get_name()})"


def _key_file(key_type: str) -> str:
    family = key_type.removeprefix("ssh-").partition("-")[0]
    return f"/etc/ssh/ssh_host_{family}_key.pub"
