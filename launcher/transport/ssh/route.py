"""Ways to hosts, as ssh_config has them."""

import contextlib
import os
import subprocess
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from fabric import Connection

from launcher.transport.ssh.host_keys.known_hosts import KnownHosts
from launcher.transport.ssh.restrictions import Policy
from rackrun.terminal import one_line

COMPLAINT_BYTES = 4096
PROXY_SECONDS = 0.5  # for a ProxyCommand to end, once it closed its end of the connection


@dataclass(frozen=True)
class ConnectSettings:
    """How to get in."""

    config: Path | None = None
    """An ssh_config file to use in place of the user's and the system's."""

    accept_new: bool = False
    """Record the keys of hosts that are in no known_hosts file; changed keys are refused still."""

    connect_seconds: float = 10.0
    banner_seconds: float = 15.0
    handshake_seconds: float = 20.0
    """From the connection to keys for it, the banner included."""
    login_seconds: float = 30.0
    """For all our keys together."""
    channel_seconds: float = 10.0

    def again(self) -> "ConnectSettings":
        """For a host that was reached before and fell silent: somebody waits for the end."""
        return replace(
            self,
            connect_seconds=4.0,
            banner_seconds=3.0,
            handshake_seconds=4.0,
            login_seconds=4.0,
            channel_seconds=1.0,
        )


@dataclass(frozen=True)
class Proxy:
    """A ProxyCommand that was started."""

    process: "subprocess.Popen[bytes]"
    complaints: IO[bytes]

    def end(self) -> None:
        """End it, if it still runs."""
        self.process.terminate()
        self.process.wait()
        self.complaints.close()

    def last_words(self) -> str:
        """How it ended, and the last line of its standard error; empty while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(PROXY_SECONDS)
            self.complaints.seek(max(0, self.complaints.seek(0, os.SEEK_END) - COMPLAINT_BYTES))
            said = self.complaints.read().decode(errors="replace").split("\n")
            words = [one_line(line) for line in said if line.strip()]
            return f"ended with {code}: {words[-1]}" if words else f"ended with {code}"
        return ""


@dataclass(frozen=True)
class Route:
    """A host as ssh_config has it, not yet connected."""

    label: str
    connection: Connection
    access: ConnectSettings
    policy: Policy
    known: KnownHosts
    key_name: str
    key_port: int
    record_in: Path
    accept_new: bool
    hash_names: bool
    gateway: "Route | None"
    family: int
    """ssh_config's AddressFamily, as sockets have it."""
    command: str
    """ssh_config's ProxyCommand, or nothing."""
    proxies: list[Proxy] = field(default_factory=list)
    """The ProxyCommands that were started."""
    opening: threading.Lock = field(default_factory=threading.Lock)
    """Held while a gateway is opened: the hosts behind it come for it all at once."""

    @property
    def target(self) -> str:
        """Where the route leads, for messages."""
        return f"{self.connection.host} port {self.connection.port}"
