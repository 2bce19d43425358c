"""The launcher's side of elastic runs, for tests: it starts ranks, sees them end, orders groups.

Hosts are folders; each has a socket as an agent has one, on which its ranks are heard and ordered.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests import warm
from tests.training.trained_rows import NOTED

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("elastic_ranks.py")


class Host:
    """The ranks of a host, and the socket of its agent."""

    def __init__(self, folder: Path, first: int, ranks: int) -> None:
        self.folder = folder
        self.first = first
        self.ranks = ranks
        self.processes: list[warm.Python] = []
        self.connections: dict[int, socket.socket] = {}
        self.starts = 0


class MembershipServer:
    """Starts hosts and orders their groups, until every rank has left or one has failed."""

    def __init__(self, folder: Path, hosts: Sequence[int] = (1, 1, 1), **options: Any) -> None:
        self.folder = folder
        self.options = options
        self.planned = sum(hosts)
        firsts = accumulate(hosts, initial=0)
        pairs = zip(firsts, hosts, strict=False)
        self.hosts = [Host(folder / f"host{n}", *pair) for n, pair in enumerate(pairs)]
        self.ports: dict[int, int] = {}
        self.members: list[int] = []  # of the newest group, by seniority
        self.formed: dict[int, dict[int, dict[str, Any]]] = {}
        self.broken: list[dict[str, Any]] = []
        self.left: set[int] = set()
        self.loses_hosts = True  # with a rank, all others of its host
        self.with_state: set[int] = set()  # members that have been in a group
        self.codes: dict[int, list[int]] = {}
        self.number = 0
        self.orders: list[dict[str, Any]] = []
        self.selector = selectors.DefaultSelector()
        self.lost: set[int] = set()  # members of which a word may still come, but no more

    def start(self, host: int, **die: Any) -> None:
        """Start the ranks of a host; `die`: where one of them ends itself."""
        this = self.hosts[host]
        (this.folder / "run").mkdir(parents=True, exist_ok=True)
        self.run(lambda: all(process.returncode is not None for process in this.processes))
        this.starts += 1
        this.connections = {}
        self.lost -= set(range(this.first, this.first + this.ranks))
        self.with_state -= set(range(this.first, this.first + this.ranks))
        path = this.folder / f"agent{this.starts}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen()
        accept = partial(self._accept, start=this.starts)
        self.selector.register(listener, selectors.EVENT_READ, (accept, this))
        with (this.folder / "printed").open("a") as printed:
            this.processes = [
                warm.Python(
                    *(SCRIPT, json.dumps(self.options), json.dumps(die if local == 0 else {})),
                    env=self._environment(this, local, path),
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                )
                for local in range(this.ranks)
            ]

    def _environment(self, host: Host, local: int, path: Path) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/tmp"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RANK": str(local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(host.ranks),
            "LOCAL_WORLD_SIZE": str(host.ranks),
            "RACKRUN_WORLD_SIZE": str(self.planned),
            "RACKRUN_MEMBERSHIP": str(path),
            "RACKRUN_FIRST_RANK": str(host.first),
            "RACKRUN_ADDRESS": "127.0.0.1",
            "RACKRUN_RUN_FOLDER": str(host.folder / "run"),
            "STEPS": str(host.folder / f"steps-{local}"),
            **NOTED,
        }

    def run(self, until: Callable[[], bool], seconds: float = 90) -> None:
        """Hear and order until something is true; AssertionError if it takes too long."""
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, self.outputs()
            for key, _ in self.selector.select(0.01):
                action, host = key.data
                action(key.fileobj, host)
            self._reap()

    def run_to_the_end(self, seconds: float = 90) -> None:
        """Go on until all processes have ended, those that were killed before included."""
        self.run(lambda: not self.alive(), seconds)

    def alive(self) -> list[int]:
        """Return the members whose processes run."""
        return [
            host.first + local
            for host in self.hosts
            for local, process in enumerate(host.processes)
            if process.returncode is None
        ]

    def kill(self, host: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to all ranks of a host; one that stops them makes it a silent host."""
        for process in self.hosts[host].processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):  # it has ended, which is not reported yet
                    os.kill(process.pid, number)

    def give_up(self, host: int) -> None:
        """Take a silent host for lost, as at the end of its lease."""
        this = self.hosts[host]
        lost_members = set(range(this.first, this.first + this.ranks))
        self.lost |= lost_members
        for local in this.connections:
            self._send(this.first + local, {"end": "silent for too long"})
        self._order([m for m in self.members if m not in lost_members], "silent")

    def end(self) -> None:
        """Tell all ranks that they belong to no group any more, as agents without a launcher do."""
        for member in self.members:
            self._send(member, {"end": "the launcher is gone"})

    def regroup(self) -> None:
        """Give up the group, and order another one of the same members."""
        self._order(self.members, "again")

    def outputs(self) -> str:
        """Return what all ranks have printed."""
        texts = [f"{path}:\n{path.read_text()}" for path in sorted(self.folder.glob("*/printed"))]
        facts = (self.orders, self.broken, self.formed, self.codes, self.left)
        return "\n".join([*texts, *map(str, facts)])

    def _accept(self, listener: Any, host: Host, start: int) -> None:
        connection, _ = listener.accept()
        hear = partial(self._hear, start=start)
        self.selector.register(connection, selectors.EVENT_READ, (hear, host))

    def _hear(self, connection: Any, host: Host, start: int) -> None:
        try:
            packet = connection.recv(1 << 16)
        except ConnectionResetError:  # it has ended without reading its last order
            packet = b""
        if not packet:
            self.selector.unregister(connection)
            connection.close()
            return
        if start < host.starts:  # of a rank that was killed, and has been started again
            return
        message = json.loads(packet)
        member = host.first + message["local"]
        host.connections[message["local"]] = connection
        if "ready" in message:
            self.ports[member] = message["ready"]
            self._take_in()
        elif "formed" in message:
            self.formed.setdefault(message["formed"], {})[member] = message
            self.with_state.add(member)
            self._take_in()
        elif "left" in message:
            self.left.add(member)
            for newcomer in {*self.members} - self.with_state:
                self._send(newcomer, {"end": "the others have finished"})
        elif "broken" in message:
            self.broken.append({"member": member, **message})
            if "is used" in message["error"] and message["broken"] == self.number:
                self._order(self.members, "its port was used")

    def _take_in(self) -> None:
        """Order the first group when all are ready, and a larger one when a newcomer is."""
        if not self.number:
            if len(self.ports) == self.planned:
                self._order(sorted(self.ports), "start", abort=False)
            return
        is_formed = len(self.formed.get(self.number, ())) == len(self.members)
        newcomers = sorted(set(self.ports) - set(self.members) - self.left - self.lost)
        if is_formed and newcomers:
            self._order([*self.members, *newcomers], "joined", abort=False)

    def _reap(self) -> None:
        for host in self.hosts:
            for local, process in enumerate(host.processes):
                member = host.first + local
                if process.returncode is None and process.poll() is not None:
                    self.codes.setdefault(member, []).append(process.returncode)
                    self.ports.pop(member, None)
                    if member in self.members and member not in self.left:
                        lost_members = [member]
                        if self.loses_hosts:
                            self.kill(self.hosts.index(host))
                            lost_members = [*range(host.first, host.first + host.ranks)]
                        self.lost |= {*lost_members}
                        self._order([m for m in self.members if m not in lost_members], "lost")

    def _order(self, members: list[int], reason: str, abort: bool = True) -> None:
        self.number += 1
        self.members = [m for m in members if m not in self.left] or members
        if not self.members:
            return
        for rank, member in enumerate(self.members):
            order = {
                "generation": self.number,
                "rank": rank,
                "world": len(self.members),
                "members": self.members,
                "master": ["127.0.0.1", self.ports.get(self.members[0], 1)],
                "token": f"{self.number:032x}",
                "reason": reason,
                "abort": abort,
            }
            self._send(member, order)
        self.orders.append(order)

    def _send(self, member: int, message: dict[str, Any]) -> None:
        for host in self.hosts:
            if (local := member - host.first) in host.connections and 0 <= local < host.ranks:
                with suppress(OSError):
                    host.connections[local].sendall(json.dumps(message).encode())

    def close(self) -> None:
        """End what still runs."""
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()
        for host in self.hosts:
            for process in host.processes:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.wait()
