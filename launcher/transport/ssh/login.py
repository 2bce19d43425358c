"""Login with keys, from an ssh-agent and from files, without a question."""

from __future__ import annotations

import io
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat
from paramiko.agent import AgentSSH
from paramiko.auth_strategy import (
    AuthFailure,
    AuthSource,
    AuthStrategy,
    InMemoryPrivateKey,
    SourceResult,
)
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import PartialAuthentication

from rackrun.launcher.transport.ssh.openssh import ClientSettings, fingerprint_of
from rackrun.launcher.transport.ssh.protocol import reason_of_disconnect, signatures

PRIVATE_KEY = re.compile(
    rb"-----BEGIN ((?:[A-Z]+ )?PRIVATE KEY)-----.*?-----END \1-----", re.DOTALL
)
CERTIFICATE = "-cert-v01@openssh.com"
"""The suffix of a certificate's type."""
CUT_SHORT = "the connection was closed in the middle of the login"
KEY_CLASSES: dict[type, Any] = {
    RSAPrivateKey: paramiko.RSAKey,
    EllipticCurvePrivateKey: paramiko.ECDSAKey,
    Ed25519PrivateKey: paramiko.Ed25519Key,
}


class PublicKeyLogin(AuthStrategy):
    """Login with the agent's keys and those in files, each tried once.

    As with ssh: IdentityFile names files, otherwise the usual ones are read; with IdentitiesOnly,
    only named keys of the agent are tried; keys that the agent holds are not read from files. Keys
    that PubkeyAcceptedAlgorithms and RequiredRSASize exclude are not tried, nor files of ours that
    other accounts may read. Fabric makes one for each connection, from its `ssh_config`.
    """

    def __init__(self, ssh_config: ClientSettings, fabric_config: object, username: str) -> None:
        super().__init__(ssh_config=paramiko.SSHConfig())  # ssh has read the user's
        self._settings = ssh_config
        self._username = username
        self.locked: list[Path] = []
        self.exposed: list[Path] = []
        self.unread: list[Path] = []
        """Files that hold no private key, or one of a kind that is not known here."""
        self.silent_agent = ""
        """The socket of an agent that does not answer."""
        self.tried = 0
        self.disconnect_reason = ""

    def authenticate(self, transport: paramiko.Transport) -> list[SourceResult]:
        """Try one key after the other, all of them within the time that paramiko has for one.

        Raises ConnectionAbortedError where the connection broke, which is no refusal: a host that
        refuses sends a disconnect with a reason.
        """
        self._transport = transport
        self._deadline = time.monotonic() + transport.auth_timeout
        try:
            return super().authenticate(transport)
        except AuthFailure as error:
            self.disconnect_reason = reason_of_disconnect(transport)
            if transport.is_active() or self.disconnect_reason:
                raise
            raise ConnectionAbortedError(CUT_SHORT) from error

    def get_sources(self) -> Iterator[AuthSource]:
        """Yield the agent's keys that are named, its other keys, then those in files."""
        names = self._settings.all("identityfile")
        files = [self._settings.path("IdentityFile", name) for name in names]
        agent = _KeyAgent(self._agent_socket())
        self.silent_agent = agent.silent
        held = {key.fingerprint: key for key in agent.get_keys()}
        prints = {file: fingerprint_of(file) if held else "" for file in files}
        named = [prints[file] for file in files if prints[file] in held]
        only_named = self._settings.first("identitiesonly") == "yes"
        others = [] if only_named else [each for each in held if each not in named]
        try:
            for each in dict.fromkeys([*named, *others]):
                yield from self._attempts(held[each])
            for file in files:
                if prints[file] not in held and (key := self._load(file)) is not None:
                    yield from self._attempts(key)
        finally:
            agent.close()

    def _agent_socket(self) -> str:
        """Return the socket that IdentityAgent or SSH_AUTH_SOCK names; empty if there is none."""
        named = self._settings.first("identityagent", "SSH_AUTH_SOCK")
        if named == "SSH_AUTH_SOCK" or named.startswith("$") and not named.startswith("${"):
            return os.environ.get(named.lstrip("$"), "")
        return os.fspath(self._settings.path("IdentityAgent", named)) if named else ""

    def _attempts(self, key: paramiko.PKey) -> Iterator[AuthSource]:
        # With its certificate from ssh_config, if it has one, then without.
        for name in self._settings.all("certificatefile"):
            file = self._settings.path("CertificateFile", name)
            plain = key.public_blob
            if fingerprint_of(file) == key.fingerprint:
                key.load_certificate(os.fspath(file))
                yield from self._attempt(key, CERTIFICATE)
                key.public_blob = plain  # resumed when the host has refused the certificate
        yield from self._attempt(key)

    def _attempt(self, key: paramiko.PKey, suffix: str = "") -> Iterator[AuthSource]:
        kind, accepted = key.get_name(), self._settings.words("pubkeyacceptedalgorithms")
        if not any(f"{name}{suffix}" in accepted for name in signatures(kind)):
            return
        fewest = int(self._settings.first("requiredrsasize") or 0)
        if kind == "ssh-rsa" and key.get_bits() < fewest:
            return
        self.tried += 1
        # paramiko gives each key this long; ours is a limit for all of them together.
        self._transport.auth_timeout = max(0.0, self._deadline - time.monotonic())
        yield _PublicKey(self._username, key)

    def _load(self, file: Path) -> paramiko.PKey | None:
        """Return the key in a file; None if it cannot be used, which is remembered."""
        try:
            status = file.stat()
            if file.suffix == ".pub" or not stat.S_ISREG(status.st_mode):
                self.unread.append(file)  # of a public key, only an agent has the private one
                return None
            # As the ssh client: a key of another owner, such as root's, may be readable.
            if status.st_uid == os.getuid() and status.st_mode & 0o077:
                self.exposed.append(file)
                return None
            return _read_key(file)
        except TypeError:  # the sign of a key with a passphrase
            self.locked.append(file)
        except OSError:
            pass  # there is no such file
        except (ValueError, paramiko.SSHException, UnknownKeyType, UnsupportedAlgorithm):
            self.unread.append(file)
        return None


class _PublicKey(InMemoryPrivateKey):
    """A login with one key; a host that wants more than that has not let us in."""

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Return nothing; raise PartialAuthentication with the ways that the host still wants."""
        wanted: list[str] = super().authenticate(transport)
        if not transport.is_authenticated():
            raise PartialAuthentication(wanted)
        return wanted


class _KeyAgent(AgentSSH):
    """The ssh-agent at a socket; without one, it has no keys."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.silent = ""
        if not path:
            return
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            self.silent = path
        else:
            self._connect(sock)  # type: ignore[attr-defined]  # as paramiko's own subclasses do

    def close(self) -> None:
        """Close the connection to the agent."""
        self._close()  # type: ignore[attr-defined]


def _read_key(file: Path) -> paramiko.PKey:
    """Return the private key in a file, in any form that ssh reads.

    Raises TypeError for a locked key, SSHException or ValueError for what is none.
    """
    try:
        return paramiko.PKey.from_path(file)
    except (ValueError, paramiko.SSHException):
        # PKCS#8, or a key behind curve parameters: paramiko knows the key, but not the form.
        match = PRIVATE_KEY.search(file.read_bytes())
        if match is None:
            raise ValueError(f"{file}: no private key") from None
        loaded = serialization.load_pem_private_key(match[0], None)
        for kind, key_class in KEY_CLASSES.items():
            if isinstance(loaded, kind):
                form = (Encoding.PEM, PrivateFormat.OpenSSH, serialization.NoEncryption())
                text = loaded.private_bytes(*form).decode()
                key: paramiko.PKey = key_class.from_private_key(io.StringIO(text))
                return key
        raise ValueError(f"{file}: of a kind that is not used here") from None
