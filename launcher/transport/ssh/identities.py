"""Login with keys, from an ssh-agent and from files."""

import base64
import io
import os
import re
import socket
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
from fabric import Config
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

from rackrun.launcher.transport.ssh.protocol import SshProtocol
from rackrun.launcher.transport.ssh.restrictions import allowed, rsa_bits, signatures

PRIVATE_KEY = re.compile(
    rb"-----BEGIN ((?:[A-Z]+ )?PRIVATE KEY)-----.*?-----END \1-----", re.DOTALL
)
OPENSSH_KEY = re.compile(
    rb"-----BEGIN OPENSSH PRIVATE KEY-----(.*?)-----END OPENSSH PRIVATE KEY-----", re.DOTALL
)
OPENSSH_MAGIC = b"openssh-key-v1\0"
CERTIFICATE = "-cert-v01@openssh.com"
"""The suffix of a certificate's type."""
CUT_SHORT = "the connection was closed in the middle of the login"
_DEFAULT_KEYS = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")


class PublicKeyLogin(AuthStrategy):
    """Login with the agent's keys and those in files, each tried once, without a prompt.

    As with ssh: IdentityFile names files, otherwise the usual ones are read; with IdentitiesOnly,
    only named keys of the agent are tried; keys that the agent holds are not read from files. Keys
    that PubkeyAcceptedAlgorithms and RequiredRSASize exclude are not tried, nor files of ours that
    other accounts may read.
    """

    def __init__(self, ssh_config: dict[str, Any], fabric_config: Config, username: str) -> None:
        super().__init__(ssh_config=fabric_config.base_ssh_config)
        self._settings = ssh_config
        self._username = username
        self._accepted = ssh_config.get(
            "pubkeyacceptedalgorithms", ssh_config.get("pubkeyacceptedkeytypes", "")
        )
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
        assert isinstance(transport, SshProtocol)
        self._transport = transport
        self._deadline = time.monotonic() + transport.auth_timeout
        try:
            return super().authenticate(transport)
        except AuthFailure as error:
            self.disconnect_reason = transport.disconnect_reason
            if transport.is_active() or self.disconnect_reason:
                raise
            raise ConnectionAbortedError(CUT_SHORT) from error

    def get_sources(self) -> Iterator[AuthSource]:
        """Yield the agent's keys that are named, its other keys, then those in files."""
        names = self._settings.get("identityfile", _DEFAULT_KEYS)
        files = {Path(name).expanduser(): _public_blob(Path(name).expanduser()) for name in names}
        agent = _KeyAgent(self._settings.get("identityagent", "SSH_AUTH_SOCK"))
        self.silent_agent = agent.silent
        held = {key.asbytes(): key for key in agent.get_keys()}
        only_named = self._settings.get("identitiesonly", "no") == "yes"
        named = [blob for blob in files.values() if blob in held]
        others = [] if only_named else [blob for blob in held if blob not in named]
        try:
            for blob in dict.fromkeys([*named, *others]):
                yield from self._attempts(held[blob])
            for file, blob in files.items():
                if blob not in held and (key := self._load(file)) is not None:
                    yield from self._attempts(key)
        finally:
            agent.close()

    def _attempts(self, key: paramiko.PKey) -> Iterator[AuthSource]:
        # With its certificate from ssh_config, if it has one, then without.
        file = Path(self._settings.get("certificatefile", "none"))
        if _certifies(_public_blob(file), key):
            plain = key.public_blob
            key.load_certificate(str(file))
            yield from self._attempt(key, CERTIFICATE)
            key.public_blob = plain  # resumed when the host has refused the certificate
        yield from self._attempt(key)

    def _attempt(self, key: paramiko.PKey, suffix: str = "") -> Iterator[AuthSource]:
        kind = key.get_name()
        names = [name for name in signatures(kind) if allowed(self._accepted, f"{name}{suffix}")]
        if not names or (kind == "ssh-rsa" and key.get_bits() < rsa_bits(self._settings)):
            return
        self._transport.pubkeys = tuple(names)
        self.tried += 1
        # paramiko gives each key this long; ours is a limit for all of them together.
        self._transport.auth_timeout = max(0.0, self._deadline - time.monotonic())
        yield _PublicKey(self._username, key)

    def _load(self, file: Path) -> paramiko.PKey | None:
        try:
            status = file.stat()
            # As the ssh client: a key of another owner, such as root's, may be readable.
            if status.st_uid == os.getuid() and status.st_mode & 0o077:
                self.exposed.append(file)
                return None
            try:
                return paramiko.PKey.from_path(file)
            except (ValueError, paramiko.SSHException):
                return _of_pem(file)
        except TypeError:  # paramiko's sign of a key with a passphrase
            self.locked.append(file)
        except OSError:
            pass  # there is no such file
        except (ValueError, paramiko.SSHException, UnknownKeyType, UnsupportedAlgorithm):
            if file.suffix != ".pub":  # a public key, whose private key only an agent has
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


def _of_pem(file: Path) -> paramiko.PKey:
    """Return a key in PKCS#8, or behind curve parameters, which ssh reads and paramiko does not.

    Raises SSHException or ValueError for anything else.
    """
    match = PRIVATE_KEY.search(file.read_bytes())
    if match is None:
        raise ValueError(f"{file}: no private key")
    loaded = serialization.load_pem_private_key(match[0], None)
    if not isinstance(loaded, RSAPrivateKey | EllipticCurvePrivateKey | Ed25519PrivateKey):
        raise ValueError(f"{file}: of no kind that is used here")
    form = (Encoding.PEM, PrivateFormat.OpenSSH, serialization.NoEncryption())
    text = loaded.private_bytes(*form).decode()
    kind: type[paramiko.PKey] = paramiko.Ed25519Key
    if isinstance(loaded, RSAPrivateKey):
        kind = paramiko.RSAKey
    elif isinstance(loaded, EllipticCurvePrivateKey):
        kind = paramiko.ECDSAKey
    key: paramiko.PKey = kind.from_private_key(io.StringIO(text))
    return key


class _KeyAgent(AgentSSH):
    """The ssh-agent that ssh_config's IdentityAgent names; no keys where there is none."""

    def __init__(self, identity_agent: str) -> None:
        super().__init__()
        named = os.environ.get("SSH_AUTH_SOCK", "none")
        path = named if identity_agent == "SSH_AUTH_SOCK" else identity_agent
        self.silent = ""
        if path == "none":
            return
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            self.silent = path
        else:
            self._connect(sock)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close the connection to the agent."""
        self._close()  # type: ignore[attr-defined]


def _public_blob(file: Path) -> bytes:
    public = file if file.suffix == ".pub" else file.with_name(f"{file.name}.pub")
    try:
        return base64.b64decode(public.read_text().split()[1], validate=True)
    except (OSError, IndexError, ValueError):
        return _public_part(file)


def _public_part(file: Path) -> bytes:
    """Return the public part of a private key; OpenSSH's form has it in clear, also if locked."""
    try:
        match = OPENSSH_KEY.search(file.read_bytes())
        data = base64.b64decode(match[1]) if match else b""
    except (OSError, ValueError):
        return b""
    if not data.startswith(OPENSSH_MAGIC):
        return b""
    message = paramiko.Message(data[len(OPENSSH_MAGIC) :])
    for _ in ("cipher", "derivation", "its options"):
        message.get_binary()
    message.get_int()  # the number of keys
    return message.get_binary()


def _certifies(blob: bytes, key: paramiko.PKey) -> bool:
    """Return whether these bytes are a certificate of a key."""
    try:
        kind = paramiko.Message(blob).get_text()
        plain = paramiko.PKey.from_type_string(kind.removesuffix(CERTIFICATE), blob)
    except (UnknownKeyType, paramiko.SSHException, ValueError):
        return False
    return kind.endswith(CERTIFICATE) and bool(plain.asbytes() == key.asbytes())
