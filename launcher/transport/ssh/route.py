"""Routes to hosts, as ssh_config describes them."""

import contextlib
import os
import subprocess
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from fabric import Connection

from rackrun.launcher.transport.ssh.host_keys import HostKeys
from rackrun.launcher.transport.ssh.openssh import ClientSettings
from rackrun.terminal import one_line

COMPLAINT_BYTES = 4096
PROXY_SECONDS = 0.5  # for a ProxyCommand to end, once it closed its end of the connection


@dataclass(frozen=True)
class ConnectSettings:
    """The options and time limits of connecting."""

    config: Path | None = None
    """An ssh_config file to use in place of the user's and the system's."""

    accept_new: bool = False
    """Record the keys of hosts that are in no known_hosts file; changed keys are still refused."""

    connect_seconds: float = 10.0
    banner_seconds: float = 15.0
    handshake_seconds: float = 20.0
    """Time from the TCP connection to the end of the key exchange, including the banner."""
    login_seconds: float = 30.0
    """Time for all our keys together."""
    channel_seconds: float = 10.0

    def with_short_timeouts(self) -> "ConnectSettings":
        """Return the settings for a host that fell silent: the user is waiting for the end."""
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

    def exit_message(self) -> str:
        """Return its exit code and the last line of its standard error; empty while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(PROXY_SECONDS)
            self.complaints.seek(max(0, self.complaints.seek(0, os.SEEK_END) - COMPLAINT_BYTES))
            printed = self.complaints.read().decode(errors="replace").split("\n")
            lines = [one_line(line) for line in printed if line.strip()]
            return f"ended with {code}: {lines[-1]}" if lines else f"ended with {code}"
        return ""


@dataclass(frozen=True)
class SshRoute:
    """A host as ssh_config describes it; its connection may still be closed."""

    label: str
    connection: Connection
    settings: ConnectSettings
    client: ClientSettings
    host_keys: HostKeys
    gateway: "SshRoute | None"
    family: int
    """ssh_config's AddressFamily, as a constant of `socket`."""
    command: str
    """ssh_config's ProxyCommand, or empty."""
    proxies: list[Proxy] = field(default_factory=list)
    """The ProxyCommands that were started."""
    opening: threading.Lock = field(default_factory=threading.Lock)
    """Held while a gateway is opened, since all hosts behind it request that at once."""

    @property
    def target(self) -> str:
        """Return host and port, for messages."""
        return f"{self.connection.host} port {self.connection.port}"
