"""Fuzz targets: the files of SSH give a value or a refusal.

hosts.txt, ssh_config and known_hosts are the user's own.
"""

import atexit
import functools
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from rackrun.errors import UsageError
from rackrun.launcher.run.hosts import Host, read_hosts, select
from rackrun.launcher.transport.ssh import ConnectSettings, Network
from rackrun.launcher.transport.ssh.openssh import known_keys
from tests.fuzz.decoders import decoder

MARKS = [" ", "\t", "\n", "\r", "\f", "\0", "\u2028", "\x85", "é", '"', "'", "\\", "=", ",", ":"]
MARKS += [
    "#",
    "|",
    "*",
    "?",
    "!",
    "[",
    "]",
    "@",
    "-",
    "/",
    "~",
    "%",
    "%h",
    "${HOME}",
    "${",
    "0",
    "22",
]
HOST_WORDS = ["gpu01", "gpu[01-16]", "jo@", "10.0.0.7", "[2001:db8::7]", "slots=", "env=A=b"]
HOST_WORDS += ["address=", "interface=eth0", "workdir=", "python=", "999999999999", "[1,4-7]"]
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKRYFGEpbCHDUGg1LpqD3sEWEA6+lqkqgJ4kmpfHRJ5h"
KNOWN_WORDS = [
    "gpu01",
    "[10.0.0.7]:2222",
    KEY,
    "@revoked ",
    "@cert-authority ",
    "|1|",
    "ssh-ed25519",
]
KNOWN_WORDS += ["|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg= "]
KEYWORDS = (
    *("HostName", "User", "Port", "IdentityFile", "IdentityAgent", "CertificateFile", "ProxyJump"),
    *("ProxyCommand", "UserKnownHostsFile", "GlobalKnownHostsFile", "HostKeyAlias", "Ciphers"),
    *("MACs", "KexAlgorithms", "HostKeyAlgorithms", "RekeyLimit", "AddressFamily", "CheckHostIP"),
    *("StrictHostKeyChecking", "RequiredRSASize", "RevokedHostKeys", "PubkeyAuthentication"),
    *("Match", "Host", "Include", "IgnoreUnknown"),
)
CONFIG_WORDS = [f"\n{keyword} " for keyword in KEYWORDS]
CONFIG_WORDS += ["yes", "no", "gpu01", "user", "originalhost", "canonical", "all", "final", "none"]
CONFIG_WORDS += ["aes256-ctr", "^"]


def words(*lists: list[str]) -> tuple[bytes, ...]:
    """Return words of a file, and what may stand between them."""
    return tuple(word.encode() for words in (*lists, MARKS) for word in words)


HOSTS = (Host("gpu01"), Host("10.0.0.7", user="jo", port=2222))


@decoder(words=words(HOST_WORDS))
def fuzz_hosts_txt(data: bytes) -> None:
    """Fuzz a host file: every accepted name is safe in a command line."""
    with suppress(UsageError):
        for host in read_hosts(holding(data)):
            assert host.name
            assert not host.name.startswith("-")
            assert host.name.isascii()
            assert not set(host.name) & set(" \t\r\n;|&$`\"'<>(){}*?!#\\/,")


@decoder(words=words(HOST_WORDS))
def fuzz_selection(data: bytes) -> None:
    """Fuzz `--include` and `--exclude`."""
    include, _, exclude = data.decode(errors="replace").partition("\n")
    with suppress(UsageError):
        assert select(HOSTS, include, exclude)


@decoder(words=words(KNOWN_WORDS))
def fuzz_known_hosts(data: bytes) -> None:
    """Fuzz a known_hosts file that is asked about two hosts: only whole keys come out of it."""
    for name in ("gpu01", "[10.0.0.7]:2222"):
        for key in known_keys(name, [holding(data)]):
            assert key.type.encode() in key.blob
            assert key.line > 0


@decoder(*(word.encode() for word in CONFIG_WORDS), words=words(CONFIG_WORDS))
def fuzz_ssh_config(data: bytes) -> None:
    """Fuzz an ssh_config file, up to the routes to two hosts; `Match exec` runs nothing."""
    if b"exec" in data.lower():
        return
    with suppress(UsageError):
        for route in Network(ConnectSettings(config=holding(data))).routes_to(HOSTS):
            assert route.client.host


@functools.cache
def folder() -> Path:
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made)
    return Path(made)


def holding(data: bytes) -> Path:
    """Write a file with these bytes."""
    file = folder() / "file"
    file.write_bytes(data)
    return file
