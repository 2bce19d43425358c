"""The keys to log in with."""

import base64
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
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

from launcher.transport.ssh.algorithms import allowed, signatures
from launcher.transport.ssh.host_keys.certificates import CERTIFICATE, certificate_of
from launcher.transport.ssh.protocol import Transport
from launcher.transport.ssh.restrictions import rsa_bits

CUT_SHORT = "it hung up in the middle of the login, without a word"
DEFAULT_KEYS = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")


class Keys(AuthStrategy):
    """The keys to log in with: the agent's and those in files, each tried once, never a prompt.

    As with ssh: IdentityFile names files, the usual ones otherwise; with IdentitiesOnly the
    agent serves only keys that are named; keys that the agent holds are not read from files. What
    PubkeyAcceptedAlgorithms and RequiredRSASize exclude is not tried.
    """

    def __init__(self, ssh_config: dict[str, Any], fabric_config: Config, username: str) -> None:
        """Take what Fabric resolved for this host."""
        super().__init__(ssh_config=fabric_config.base_ssh_config)
        self._settings = ssh_config
        self._username = username
        self._accepted = ssh_config.get(
            "pubkeyacceptedalgorithms", ssh_config.get("pubkeyacceptedkeytypes", "")
        )
        self.locked: list[Path] = []
        self.tried = 0
        self.goodbye = ""

    def authenticate(self, transport: paramiko.Transport) -> list[SourceResult]:
        """Try one key after the other; the transport's time for one is that for all of them.

        Raises ConnectionAbortedError where the connection broke: that refuses nobody. A host that
        ends it on purpose says goodbye.
        """
        assert isinstance(transport, Transport), "login.py asks for ours"
        self._transport = transport
        self._deadline = time.monotonic() + transport.auth_timeout
        try:
            return super().authenticate(transport)
        except AuthFailure as error:
            self.goodbye = transport.goodbye
            if transport.is_active() or self.goodbye:
                raise
            raise ConnectionAbortedError(CUT_SHORT) from error

    def get_sources(self) -> Iterator[AuthSource]:
        """The agent's keys that are named, its other keys, then the files."""
        names = self._settings.get("identityfile", DEFAULT_KEYS)
        files = {Path(name).expanduser(): _public_blob(Path(name).expanduser()) for name in names}
        agent = _KeyAgent(self._settings.get("identityagent", "SSH_AUTH_SOCK"))
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
        """With the certificate of ssh_config's CertificateFile if it is this key's, and without."""
        file = Path(self._settings.get("certificatefile", "none"))
        shown = certificate_of(_public_blob(file))
        if shown is not None and shown.key == key.asbytes():
            own = key.public_blob
            key.load_certificate(str(file))
            yield from self._attempt(key, CERTIFICATE)
            key.public_blob = own  # the next one is asked for when this one was refused
        yield from self._attempt(key)

    def _attempt(self, key: paramiko.PKey, suffix: str = "") -> Iterator[AuthSource]:
        """Try a key, unless ssh_config forbids all of its algorithms, or it is too short."""
        kind = key.get_name()
        names = [name for name in signatures(kind) if allowed(self._accepted, f"{name}{suffix}")]
        if not names or (kind == "ssh-rsa" and key.get_bits() < rsa_bits(self._settings)):
            return
        self._transport.pubkeys = tuple(names)
        self.tried += 1
        self._transport.auth_timeout = max(0.0, self._deadline - time.monotonic())
        yield InMemoryPrivateKey(self._username, key)

    def _load(self, file: Path) -> paramiko.PKey | None:
        """The key of a file; None when there is none, or one that needs a passphrase."""
        try:
            return paramiko.PKey.from_path(file)
        except TypeError:
            self.locked.append(file)
        except (OSError, ValueError, UnknownKeyType):
            pass  # no such file, or a public key whose other half only an agent could have
        return None


class _KeyAgent(AgentSSH):
    """The ssh-agent that ssh_config's IdentityAgent names; without one it holds no keys."""

    def __init__(self, identity_agent: str) -> None:
        super().__init__()
        named = os.environ.get("SSH_AUTH_SOCK", "none")
        path = named if identity_agent == "SSH_AUTH_SOCK" else identity_agent
        if path == "none":
            return
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
        else:
            self._connect(sock)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


def _public_blob(file: Path) -> bytes:
    """The public half of a key file, from the .pub beside it; empty when that does not tell."""
    public = file if file.suffix == ".pub" else file.with_name(f"{file.name}.pub")
    try:
        return base64.b64decode(public.read_text().split()[1], validate=True)
    except (OSError, IndexError, ValueError):
        return b""
