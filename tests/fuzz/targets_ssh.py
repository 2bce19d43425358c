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

HOSTS = (Host("gpu01"), Host("10.0.0.7", user="jo", port=2222))


def fuzz_hosts_txt(data: bytes) -> None:
    """Fuzz a host file: every accepted name is safe in a command line."""
    with suppress(UsageError):
        for host in read_hosts(holding(data)):
            assert host.name
            assert not host.name.startswith("-")
            assert host.name.isascii()
            assert not set(host.name) & set(" \t\r\n;|&$`\"'<>(){}*?!#\\/,")


def fuzz_selection(data: bytes) -> None:
    """Fuzz `--include` and `--exclude`."""
    include, _, exclude = data.decode(errors="replace").partition("\n")
    with suppress(UsageError):
        assert select(HOSTS, include, exclude)


def fuzz_known_hosts(data: bytes) -> None:
    """Fuzz a known_hosts file that is asked about two hosts: only whole keys come out of it."""
    for name in ("gpu01", "[10.0.0.7]:2222"):
        for key in known_keys(name, [holding(data)]):
            assert key.type.encode() in key.blob
            assert key.line > 0


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
