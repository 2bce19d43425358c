"""The policy for host keys: which one is accepted, and the errors for all others.

RevokedHostKeys of ssh_config names files of keys that no host may have, even if known_hosts has
them. Such a file is a text with a public key on each line, or a binary list (KRL) as
`ssh-keygen -k` makes it, which `ssh-keygen -Q` reads. With a file that cannot be read or is
invalid, no connection is made, as with the ssh client.
"""

import base64
import shlex
import subprocess
import time
from pathlib import Path

import paramiko
from paramiko.pkey import UnknownKeyType

from rackrun.launcher.errors import AccessRefused
from rackrun.launcher.transport.ssh.certificates import Certificate, certificate_of, packed
from rackrun.launcher.transport.ssh.known_hosts import (
    KeyVerdict,
    fingerprint,
    known_hosts_line,
    record,
)
from rackrun.launcher.transport.ssh.route import SshRoute
from rackrun.terminal import one_line

KRL_MAGIC = b"SSHKRL\n\0"
KRL_SECONDS = 10.0  # for ssh-keygen to read a binary list


class HostKeyPolicy(paramiko.MissingHostKeyPolicy):
    """Checks the host key of every connection before anything is sent.

    paramiko itself is given no known keys, so that it asks this policy about each of them.
    """

    def __init__(self, route: SshRoute) -> None:
        self._route = route

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        """Return when the key is known or may be recorded; raise AccessRefused otherwise."""
        route, blob = self._route, key.asbytes()
        name, port, kind = route.key_name, route.key_port, key.get_name()
        verdict = self._verdict(key)
        if verdict.status == "unknown" and route.accept_new:
            line = known_hosts_line(name, port, kind, blob, route.hash_names)
            try:
                record(route.record_in, line)
            except OSError as error:
                reason = f"cannot be recorded in {route.record_in}: {error.strerror}"
                raise AccessRefused(f"{route.label}: its host key {reason}") from error
        elif verdict.status == "unknown":
            raise AccessRefused(_unknown_key(route, known_hosts_line(name, port, kind, blob), key))
        elif verdict.status != "known":
            raise AccessRefused(_wrong_key(route, verdict, key))

    def _verdict(self, key: paramiko.PKey) -> KeyVerdict:
        route = self._route
        known_hosts, name, port = route.known_hosts, route.key_name, route.key_port
        shown = certificate_of(key.public_blob.key_blob) if key.public_blob else None
        self._check_restrictions(key, shown)
        verdict = known_hosts.verdict_on(name, port, key.asbytes())
        if shown is None or verdict.status == "revoked":
            return verdict
        authority = known_hosts.verdict_on(name, port, shown.authority)
        if authority.status == "revoked":
            return authority
        trusted = shown.scheme in route.restrictions.authorities
        certified = trusted and known_hosts.is_certified(name, port, shown, time.time())
        # Of a certificate that proves nothing, the plain key still counts, as with ssh.
        return KeyVerdict("known") if certified and is_signed(shown) else verdict

    def _check_restrictions(self, key: paramiko.PKey, shown: Certificate | None) -> None:
        # Known or not: ssh_config forbids these keys.
        restrictions = self._route.restrictions
        label, target = self._route.label, self._route.target
        if key.get_name() == "ssh-rsa" and key.get_bits() < restrictions.rsa_bits:
            bits = f"{key.get_bits()} bits, RequiredRSASize {restrictions.rsa_bits}"
            raise AccessRefused(f"{label}: the host key of {target} is too short: {bits}")
        underlying = frozenset({key.asbytes(), *([shown.authority] if shown else [])})
        whole = key.public_blob.key_blob if key.public_blob else key.asbytes()
        for file in restrictions.revoked:
            if is_revoked(file, whole, underlying):
                text = f"the host key of {target} is revoked by {file}; give the host a new key"
                raise AccessRefused(f"{label}: {text}\n    shown    {_shown(key)}")


def is_signed(certificate: Certificate) -> bool:
    """Return whether the authority has signed a certificate; a host may have sent any bytes."""
    signature = paramiko.Message(certificate.signature)
    try:
        kind = paramiko.Message(certificate.authority).get_text()
        authority = paramiko.PKey.from_type_string(kind, certificate.authority)
        return bool(authority.verify_ssh_sig(certificate.signed, signature))
    except (UnknownKeyType, paramiko.SSHException, ValueError):
        return False


def is_revoked(file: Path, shown: bytes, underlying: frozenset[bytes]) -> bool:
    """Return whether a file revokes the key or certificate `shown`.

    `underlying` are the plain keys of a certificate: its own and its authority's. Raises
    AccessRefused where the file cannot be read or is invalid.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise AccessRefused(f"RevokedHostKeys {file}: {error.strerror}") from None
    if content.startswith(KRL_MAGIC):
        return _is_in_list(file, shown)
    return not underlying.isdisjoint(_text_keys(file, content))


def _text_keys(file: Path, content: bytes) -> set[bytes]:
    keys: set[bytes] = set()
    for number, line in enumerate(content.split(b"\n"), start=1):
        fields = line.split()
        if fields and not fields[0].startswith(b"#"):
            try:
                blob = base64.b64decode(fields[1], validate=True)
            except (IndexError, ValueError):
                blob = b""
            if not blob.startswith(packed(fields[0])):
                raise AccessRefused(f"RevokedHostKeys {file}:{number}: not a public key")
            keys.add(blob)
    return keys


def _is_in_list(file: Path, shown: bytes) -> bool:
    kind = shown[4 : 4 + int.from_bytes(shown[:4], "big")]  # a key begins with its type
    line = kind + b" " + base64.b64encode(shown) + b"\n"
    command = ["ssh-keygen", "-Q", "-f", str(file), "/dev/stdin"]
    try:
        asked = subprocess.run(command, input=line, capture_output=True, timeout=KRL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"ssh-keygen, which reads such lists, failed: {error}"
        raise AccessRefused(f"RevokedHostKeys {file}: {reason}") from None
    if b"REVOKED" not in asked.stdout and asked.returncode != 0:
        message = one_line(asked.stderr.decode(errors="replace"))
        raise AccessRefused(f"RevokedHostKeys {file}: {message}")
    return asked.returncode != 0


def _unknown_key(route: SshRoute, line: str, key: paramiko.PKey) -> str:
    return (
        f"{route.label}: the host key of {route.target} is not known\n"
        f"    shown    {_shown(key)}\n"
        f"    compare it on that host with: ssh-keygen -lf {_key_file(key.get_name())}\n"
        f"    then type: echo {shlex.quote(line)} >> {shlex.quote(str(route.record_in))}\n"
        f"    or, to trust every new host at first sight, add --accept-new"
    )


def _wrong_key(route: SshRoute, verdict: KeyVerdict, key: paramiko.PKey) -> str:
    recorded = verdict.lines[0]
    entry = known_hosts_line(route.key_name, route.key_port, "", b"").split()[0]
    if verdict.status == "revoked":
        return (
            f"{route.label}: the host key of {route.target} is revoked\n"
            f"    shown    {_shown(key)}\n"
            f"    revoked  {recorded.file}:{recorded.line}; give the host a new key"
        )
    return (
        f"{route.label}: the host key of {route.target} has CHANGED: a new machine, or an"
        " attacker in between\n"
        f"    known    {fingerprint(recorded.blob)}"
        f" ({recorded.type}, {recorded.file}:{recorded.line})\n"
        f"    shown    {_shown(key)}\n"
        f"    compare it on that host with: ssh-keygen -lf {_key_file(key.get_name())}\n"
        f"    then type: ssh-keygen -f {shlex.quote(str(recorded.file))} -R {shlex.quote(entry)}"
    )


def _shown(key: paramiko.PKey) -> str:
    return f"{fingerprint(key.asbytes())} ({key.get_name()})"


def _key_file(key_type: str) -> str:
    family = key_type.removeprefix("ssh-").partition("-")[0]
    return f"/etc/ssh/ssh_host_{family}_key.pub"
