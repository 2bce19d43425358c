"""Hosts as separate as one machine allows: network, processes, /tmp and name of their own."""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tests.lab import warm
from tests.lab.data import drawn_shards
from tests.lab.hosts import ROOT, Sshd, children, command_line, parent_of, sshd_path, with_signal
from tests.lab.network import NetLab, port
from tests.lab.run import MAIN
from tests.lab.waiting import until

SETUP = """
mkdir -p {seen} && mount --bind {root} {seen} && mount -t tmpfs -o mode=1777,size=64m none /tmp &&
mkdir -p {root} && mount --bind {seen} {root} || exit
hostname {name}; exec "$@"
"""
"""Every host has a /tmp of its own; a clone of the project in /tmp is seen there still."""

LOADER, DAEMON = "sleep\x0098765\0", "sleep\x0098766\0"
"""What a rank of tests/lab/fault_rank.py starts: a child, and what has left its family."""

OURS = ("rackrun-", "torchelastic", "pymp-")
KEPT = re.compile(r"\.lock(\.gpu\d+)?$|^rackrun-cache-\d+$")
"""How the names in /tmp begin of which nothing may stay."""


class Hosts(NetLab):
    """`count` hosts behind cables, each its own list of processes; nothing of theirs is shared.

    On each runs a process of somebody else that looks like a rank's and must live on. Their folder
    is outside /tmp, which every host has for itself.
    """

    def __init__(self, count: int) -> None:
        self.others: dict[int, subprocess.Popen[bytes]] = {}
        super().__init__(Path(tempfile.mkdtemp(prefix="rackrun-test-", dir="/var/tmp")), count)
        self.home.mkdir()

    def launcher(self, *args: str, fresh: bool = False, **more: Any) -> Any:
        """Start `./run-ssh` at the switch, with its imports done or as a fresh Python."""
        words = (os.fspath(MAIN), "./run-ssh", *args)
        variables = {"PYTHONPATH": os.fspath(ROOT), "HOME": os.fspath(self.home)}
        options = {
            "cwd": self.folder,
            "env": {**os.environ, **variables, **more.pop("env", {})},
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "errors": "replace",
            "start_new_session": True,
            **more,
        }
        warm.server("launcher")  # here, not at the switch, so that one can see who has gone there
        with in_network(self.bridge):
            if fresh:
                return subprocess.Popen([sys.executable, *words], **options)
            process = warm.Launcher(*words, **options)
            until(lambda: shares_network(process.pid), "the launcher is at the switch", 20)
            return process

    def run_ssh(self, *args: str, verb: tuple[str, ...] = (), **more: Any) -> Any:
        """Start it with the lab's ssh_config."""
        return self.launcher(*verb, "--ssh-config", os.fspath(self.config), *args, **more)

    def line_of(self, host: Sshd) -> str:
        """Return the host's line in hosts.txt, its address: the launcher knows no names."""
        return f"{host.address}:{host.port}"

    def apart(self, number: int) -> tuple[str, ...]:
        """Return the words that start a program as the first process of a host."""
        space = ("unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc")
        setup = SETUP.format(name=f"node{number}", root=ROOT, seen=self.folder / "seen")
        return ("ip", "netns", "exec", self.names[number - 1], *space, "sh", "-c", setup, "sh")

    def inside(self, number: int) -> tuple[str, ...]:
        """Return the words that start a program on a host that is up."""
        first = str(self.first(number))
        return ("nsenter", "--target", first, "--pid", "--mount", "--net", "--uts")

    def _start_host(self, number: int, name: str) -> None:
        address = f"10.77.0.{10 + number}"
        host = self.start(address, command=self.apart(number), port=port())
        until(lambda: "Server listening" in host.log, "sshd listens", 60)
        self._start_other(number)

    def _start_other(self, number: int) -> None:
        sleep = (*self.inside(number), *LOADER.strip("\0").split("\0"))
        self.others[number] = subprocess.Popen(sleep)
        until(lambda: LOADER in self._all(number).values(), "the other process is up", 20)

    def plug_cable(self, number: int) -> None:
        """Bring it up; what is remembered of neighbors that were missed is forgotten."""
        super().plug_cable(number)
        for name in (self.bridge, *self.names):
            self._in(name, "ip", "neighbor", "flush", "all")

    def allow(self, number: int) -> None:
        """Take the rules of `firewall` away again."""
        self._in(self.names[number - 1], "iptables", "-F", "INPUT")

    def cut_power(self, number: int) -> None:
        """End everything on a host at once, and its link: no connection is closed."""
        self.pull_cable(number)
        host, other = self.hosts[number - 1], self.others.pop(number)
        with_signal(self.first(number), signal.SIGKILL)  # and with it all of its list, at once
        host.process.wait()
        other.wait()

    def boot(self, number: int) -> None:
        """Start a host that lost its power, with an empty /tmp and the same keys."""
        host = self.hosts[number - 1]
        before = host.log.count("Server listening")
        with (host.folder / "log").open("ab") as log:
            args = [*self.apart(number), sshd_path(), "-D", "-e", "-f"]
            host.process = subprocess.Popen(
                [*args, os.fspath(host.folder / "sshd_config")],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        until(lambda: host.log.count("Server listening") > before, "sshd listens", 60)
        self._start_other(number)
        self.plug_cable(number)

    def first(self, number: int) -> int:
        """Return the process id, as this machine counts, of a host's sshd."""
        below = children(self.hosts[number - 1].process.pid)
        return next(pid for pid in below if "sshd_config" in command_line(pid))

    def _all(self, number: int) -> dict[int, str]:
        """Return all processes in the list of a host but its sshd."""
        first = self.first(number)
        list_of = os.readlink(f"/proc/{first}/ns/pid")  # noqa: PTH115  asked for each process
        lines = {}
        for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208
            with suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/pid") == list_of:  # noqa: PTH115
                    lines[int(name)] = command_line(int(name))
        return {pid: line for pid, line in lines.items() if line and pid != first}

    def processes(self, number: int) -> dict[int, str]:
        """Return what runs on a host beside its sshd and the process of somebody else."""
        other = self.others.get(number)
        return {
            p: line
            for p, line in self._all(number).items()
            if not other or p not in children(other.pid)
        }

    def parts(self, number: int) -> dict[str, list[int]]:
        """Return the processes of a run on a host by what they are, as its tree shows.

        A rank is what has a loader; above it are a shim, torchrun, and the agent.
        """
        lines = self.processes(number)
        parts: dict[str, list[int]] = {}
        for pid, line in lines.items():
            kind = "daemon" if line == DAEMON else "loader" if line == LOADER else ""
            if kind:
                parts.setdefault(kind, []).append(pid)
        ranks = {parent_of(pid) for pid in parts.get("loader", [])}
        ranks |= {pid for pid, line in lines.items() if "-m\0rackrun.training\0catdog" in line}
        for rank in ranks & lines.keys():
            for kind, pid in self._above(rank, lines):
                if pid not in parts.setdefault(kind, []):
                    parts[kind].append(pid)
        frozen = [pid for pid, line in lines.items() if line.startswith("sshd: ")]
        return {"session": frozen, **parts}

    def _above(self, rank: int, lines: dict[int, str]) -> Iterator[tuple[str, int]]:
        yield "rank", rank
        kind, pid = "shim", parent_of(rank)
        while pid in lines:
            line = lines[pid]
            if line.startswith("sshd: "):
                yield "session", pid
                return
            if "fake_torchrun.py" in line or "torch.distributed.run" in line:
                kind = "torchrun"
            yield kind, pid
            kind = "agent" if kind == "torchrun" else kind
            pid = parent_of(pid)

    def tmp(self, number: int) -> Path:
        """Return the /tmp of a host."""
        return Path(f"/proc/{self.first(number)}/root/tmp")

    def left(self) -> Iterator[str]:
        """Yield what runs or lies on any host that did not before; locks and indexes are kept."""
        for number, host in enumerate(self.hosts, start=1):
            for line in self.processes(number).values():
                # A login whose end was lost with the cable stays for hours; what it runs counts.
                if not line.startswith("sshd: "):
                    yield f"{host.address} runs {line.replace(chr(0), ' ')[:100]}"
            for path in self.tmp(number).iterdir():
                if path.name.startswith(OURS) and not KEPT.search(path.name):
                    yield f"{host.address} keeps {path.name}"
            if self.others[number].poll() is not None:
                yield f"{host.address} has lost the process of somebody else"

    def settle(self, seconds: float) -> None:
        """Wait until nothing is left on any host, for so long at most."""
        with suppress(AssertionError):
            until(lambda: not any(self.left()), seconds=seconds)

    @cached_property
    def shards(self) -> Path:
        """Return a folder of real shards, drawn and converted once."""
        return drawn_shards(self.folder, 40)

    @cached_property
    def many_shards(self) -> Path:
        """Return one that is larger than the cache of a host."""
        return drawn_shards(self.folder, 400, "--shards", "8")

    def stop(self) -> None:
        """End the hosts and remove what they had."""
        for number, host in enumerate(self.hosts, start=1):
            if host.process.poll() is None:
                self.cut_power(number)
        super().stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class OnHosts:
    """A run on hosts of its own, which end with it."""

    def __init__(self, count: int) -> None:
        self.hosts = Hosts(count)
        self.runs = self.hosts.folder / "runs"
        self.process: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.communicate()
        self.hosts.stop()

    def write_hosts(self) -> str:
        """Write hosts.txt and return its path."""
        return self.hosts.cheap_hosts(f"workdir={self.hosts.folder} slots=1")


@contextmanager
def in_network(name: str) -> Iterator[None]:
    """Be in the network of a namespace meanwhile, as what is started is from then on."""
    with Path("/proc/self/ns/net").open() as mine, Path("/run/netns", name).open() as theirs:
        enter(theirs.fileno())
        try:
            yield
        finally:
            enter(mine.fileno())


def shares_network(pid: int) -> bool:
    """Return True once a process is in our network, or gone."""
    try:
        return Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink()
    except OSError:
        return True


def enter(descriptor: int) -> None:
    """Let this thread be in a namespace."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), "setns")
