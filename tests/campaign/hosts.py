"""Hosts as separate as one machine allows: network, processes, /tmp and name of their own."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path

from tests.campaign.outcome import litter
from tests.lab.hosts import ROOT, Sshd, children, command_line, with_signal
from tests.lab.network import NetLab, port
from tests.lab.waiting import until
from tests.launcher.lifecycle.test_serving import drawn_shards

SETUP = """
mkdir -p {seen} && mount --bind {root} {seen} && mount -t tmpfs -o mode=1777,size=64m none /tmp &&
mkdir -p {root} && mount --bind {seen} {root} || exit
hostname {name}; exec "$@"
"""
"""Every host has a /tmp of its own; a clone of the project in /tmp is seen there still."""


class Hosts(NetLab):
    """`count` hosts behind cables, each its own list of processes; nothing of theirs is shared.

    Their folder is outside /tmp, which every host has for itself.
    """

    def __init__(self, count: int) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="rackrun-campaign-", dir="/var/tmp")), count)
        self.home = self.folder / "home"
        self.home.mkdir()

    @cached_property
    def shards(self) -> Path:
        """Return a folder of real shards, drawn and converted once."""
        return drawn_shards(self.folder)

    @cached_property
    def many_shards(self) -> Path:
        """Return one that is larger than the cache of a host in rounds of cache peers."""
        return drawn_shards(self.folder, 400, "--shards", "8")

    def python(self) -> str:
        """Return a Python that starts afresh: a fault may hit the launcher's start."""
        return sys.executable

    def apart(self, number: int) -> tuple[str, ...]:
        """Return the words that start a program as the first process of a host."""
        space = ("unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc")
        setup = SETUP.format(name=f"node{number}", root=ROOT, seen=self.folder / "seen")
        return ("ip", "netns", "exec", self.names[number - 1], *space, "sh", "-c", setup, "sh")

    def _start_host(self, number: int, name: str) -> None:
        address = f"10.77.0.{10 + number}"
        host = self.start(address, command=self.apart(number), port=port())
        until(lambda: "Server listening" in host.log, "sshd listens", 60)

    def cut_power(self, number: int) -> None:
        """End everything on a host at once, and its link: no connection is closed."""
        self.pull_cable(number)
        host = self.hosts[number - 1]
        with_signal(self.first(host), signal.SIGKILL)  # and with it all of its list, at once
        host.process.wait()

    def boot(self, number: int) -> None:
        """Start a host that lost its power, with an empty /tmp and the same keys."""
        host = self.hosts[number - 1]
        config = host.folder / "sshd_config"
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "sshd"
        before = host.log.count("Server listening")
        with (host.folder / "log").open("ab") as log:
            args = [*self.apart(number), sshd, "-D", "-e", "-f", os.fspath(config)]
            streams = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            host.process = subprocess.Popen(args, **streams)
        until(lambda: host.log.count("Server listening") > before, "sshd listens", 60)
        self.plug_cable(number)

    def left(self) -> list[str]:
        """Return what runs on any host beside its sshd, as `host: command line`."""
        return [
            f"{self.line_of(host)}: {line}"
            for host in self.hosts
            for line in host.processes().values()
            if not is_daemon(line)
        ]

    def tmp(self, number: int) -> Path:
        """Return the /tmp of a host."""
        return Path(f"/proc/{self.first(self.hosts[number - 1])}/root/tmp")

    def litter(self) -> list[str]:
        """Return what lies in the /tmp of any host."""
        return [
            f"{self.line_of(host)}: /tmp/{name}"
            for number, host in enumerate(self.hosts, start=1)
            for name in litter(self.tmp(number))
        ]

    def first(self, host: Sshd) -> int:
        """Return the process id, as this machine counts, of a host's sshd."""
        below = children(host.process.pid)
        return next(pid for pid in below if is_daemon(command_line(pid)))

    def settle(self, seconds: float) -> float:
        """Wait until nothing runs on any host; return how long that took."""
        began = time.monotonic()
        while self.left() and time.monotonic() - began < seconds:
            time.sleep(0.05)
        return time.monotonic() - began

    def stop(self) -> None:
        """End the hosts and remove what they had."""
        for number, host in enumerate(self.hosts, start=1):
            if host.process.poll() is None:
                self.cut_power(number)
        super().stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def is_daemon(line: str) -> bool:
    """Return True for a host's sshd, not its sessions, and for what started it."""
    return line.startswith("unshare\0") or "sshd_config" in line
