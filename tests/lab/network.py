"""Hosts with cables: network namespaces on a bridge, each with a name and an sshd of its own."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.lab import warm
from tests.lab.hosts import Lab, Sshd
from tests.lab.needs import need
from tests.lab.waiting import until


def port() -> int:
    """Return the port of the hosts; their locks are named after it, so each worker has its own."""
    return 2200 + os.getpid() % 20000


HOSTS_FILE = "127.0.0.1 localhost\n127.0.1.1 {name}\n"


class Cables:
    """A bridge in a namespace of its own, 10.77.0.1, and namespaces behind cables, 10.77.0.11 on.

    `bridge` and `names` are those of the namespaces.
    """

    def __init__(self, count: int) -> None:
        need("root")
        mark = f"rackrun{os.getpid()}"
        self.bridge = f"{mark}-0"
        self.names = [f"{mark}-{number}" for number in range(1, count + 1)]
        self._lay_bridge()
        for number in range(1, count + 1):
            self._lay_cable(number)

    def remove(self) -> None:
        """Delete the namespaces, and all that hangs on them."""
        for name in (*self.names, self.bridge):
            subprocess.run(["ip", "netns", "delete", name], check=False)

    def pull_cable(self, number: int) -> None:
        """Take the link of a host down at the switch."""
        self._in(self.bridge, "ip", "link", "set", f"port{number}", "down")

    def plug_cable(self, number: int) -> None:
        self._in(self.bridge, "ip", "link", "set", f"port{number}", "up")

    def slow_down(self, number: int, kilobits: int) -> None:
        """Let a host send no faster than that."""
        slow = ("tbf", "rate", f"{kilobits}kbit", "burst", "3000", "latency", "5s")
        self._in(self.names[number - 1], "tc", "qdisc", "add", "dev", "eth0", "root", *slow)

    def _lay_bridge(self) -> None:
        run("ip", "netns", "add", self.bridge)
        self._in(self.bridge, "ip", "link", "set", "lo", "up")
        self._in(self.bridge, "ip", "link", "add", "br0", "type", "bridge")
        self._in(self.bridge, "ip", "address", "add", "10.77.0.1/24", "dev", "br0")
        self._in(self.bridge, "ip", "link", "set", "br0", "up")

    def _lay_cable(self, number: int) -> None:
        name, port = self.names[number - 1], f"port{number}"
        run("ip", "netns", "add", name)
        cable = ("type", "veth", "peer", "name", "eth0", "netns", name)
        self._in(self.bridge, "ip", "link", "add", port, *cable)
        self._in(self.bridge, "ip", "link", "set", port, "master", "br0", "up")
        self._in(name, "ip", "address", "add", f"10.77.0.{10 + number}/24", "dev", "eth0")
        self._in(name, "ip", "link", "set", "eth0", "up")
        self._in(name, "ip", "link", "set", "lo", "up")

    def _in(self, name: str, *command: str) -> None:
        run("ip", "netns", "exec", name, *command)


class NetLab(Cables, Lab):
    """Hosts behind cables, each with a name and an sshd; the launcher is where the bridge is."""

    def __init__(self, folder: Path, count: int) -> None:
        Lab.__init__(self, folder)
        Cables.__init__(self, count)
        self.etc = [Path("/etc/netns") / name for name in (self.bridge, *self.names)]
        etc_hosts = "".join(f"10.77.0.{10 + n} node{n}\n" for n in range(1, count + 1))
        self._write_etc(self.bridge, f"127.0.0.1 localhost {socket.gethostname()}\n{etc_hosts}")
        for number, name in enumerate(self.names, start=1):
            self._write_etc(name, HOSTS_FILE.format(name=f"node{number}"))
            self._start_host(number, name)
        self.trust()

    def run_ssh(self, *args: str, **more: Any) -> "subprocess.Popen[str]":
        """Start the launcher in the bridge's namespace."""
        namespace = ("ip", "netns", "exec", self.bridge)
        return super().run_ssh(*args, before=namespace, python=self.python(), **more)

    def python(self) -> str:
        """Return what runs the launcher: a Python whose imports are done."""
        return os.fspath(warm.interpreter())

    def firewall(self, number: int, *rule: str) -> None:
        """Add a rule for what comes in at a host."""
        self._in(self.names[number - 1], "iptables", "-A", "INPUT", *rule)

    def ask(self, address: str) -> None:
        """Let the launcher ask this name server."""
        (self.etc[0] / "resolv.conf").write_text(f"nameserver {address}\n")

    def stop(self) -> None:
        super().stop()
        self._remove_locks()
        self.remove()
        for folder in self.etc:
            shutil.rmtree(folder)

    def _remove_locks(self) -> None:
        """Remove the locks of agents that a test cut off or killed."""
        for path in self.folder.glob("runs/2*/plan.json"):
            for host in json.loads(path.read_text())["hosts"]:
                for lock, _ in host["locks"]:
                    Path(lock).unlink(missing_ok=True)

    def _write_etc(self, name: str, hosts: str) -> None:
        folder = Path("/etc/netns") / name
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(hosts)

    def _start_host(self, number: int, name: str) -> None:
        named = ("unshare", "--uts", "sh", "-c", f'hostname node{number}; exec "$@"', "sh")
        address = f"10.77.0.{10 + number}"
        host = self.start(address, command=("ip", "netns", "exec", name, *named), port=port())
        until(lambda: "Server listening" in host.log, "sshd listens", 20)

    def trust(self) -> None:
        """Add every host to known_hosts by its name and by its address."""
        lines = [
            f"[{name}]:{host.port} {host.public_key}\n"
            for number, host in enumerate(self.hosts, start=1)
            for name in (host.address, f"node{number}")
        ]
        self.known_hosts.write_text("".join(lines))

    def line_of(self, host: Sshd) -> str:
        """Return the host's line in hosts.txt: a name, which the host resolves to 127.0.1.1."""
        return f"node{self.hosts.index(host) + 1}:{host.port}"


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


@contextmanager
def net_labs(folder: Path) -> Iterator[Callable[[int], NetLab]]:
    """Yield what makes this many hosts behind cables, in a new folder; end them at the end."""
    with ExitStack() as labs:

        def make(count: int) -> NetLab:
            folder.mkdir()
            lab = NetLab(folder, count)
            labs.callback(lab.stop)
            return lab

        yield make
