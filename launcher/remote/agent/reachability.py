"""Calls to other hosts, to find out which of them cannot be reached from here.

Each agent binds a port without listening there: a refusal is an answer too, and proves that packets
go both ways. Only silence counts against a host.
"""

from __future__ import annotations

import socket
import threading
import time

from rackrun.launcher.remote.agent.frames import Launcher

CALLERS = 64  # threads


class Reachability:
    """One round of calls at a time; the latest replaces the one before."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.port = socket.socket()  # for calls of other hosts: nothing listens there
        self.callers: list[threading.Thread] = []
        self.silent: set[str] = set()  # hosts that have been called and have not answered
        self.until = 0.0

    def open(self) -> int:
        """Return the port at which other hosts may call this one."""
        self.port.bind(("", 0))  # any port, as gloo and NCCL use: past the same firewalls
        return int(self.port.getsockname()[1])

    def begin(self, hosts: list[tuple[str, int]], seconds: float) -> None:
        """Call other hosts at their ports."""
        now = time.monotonic()
        self.silent, self.until = set(), now + seconds
        # Only in the first half of the time: the last ones called need some to answer.
        args = (list(hosts), self.silent, now + seconds / 2, self.until)
        self.callers = [
            threading.Thread(target=_call_some, args=args, daemon=True)
            for _ in range(max(1, min(CALLERS, len(hosts))))
        ]
        for caller in self.callers:
            caller.start()

    def report(self, now: float) -> None:
        """Report, after all answers or when time is up, the hosts that did not answer."""
        if not self.callers:
            return
        if now > self.until or not any(caller.is_alive() for caller in self.callers):
            self.callers = []
            self.launcher.send_event(event="unreached", addresses=sorted(self.silent.copy()))


def _call_some(
    hosts: list[tuple[str, int]], silent: set[str], call_until: float, until: float
) -> None:
    """Call hosts, which several threads take from one list, until there is no more time."""
    while time.monotonic() < call_until:
        try:
            address, port = hosts.pop()
        except IndexError:
            return
        silent.add(address)
        try:
            socket.create_connection((address, port), until - time.monotonic()).close()
        except ConnectionRefusedError:
            pass
        except OSError:
            continue
        silent.discard(address)
