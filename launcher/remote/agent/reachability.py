"""Calls to other hosts, to find out which of them cannot be reached from here.

Each agent binds a port without listening there: a refusal is an answer too, and proves that packets
go both ways. Only silence counts against a host.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import resource
import selectors
import socket
import time

from rackrun.launcher.remote.agent.frames import Launcher
from rackrun.launcher.remote.network import family_of
from rackrun.launcher.remote.processes import names_in

CALLS = 256  # to other hosts at a time
SPARE_DESCRIPTORS = 32  # for all else that the agent opens


class Reachability:
    """One round of calls at a time; the latest replaces the one before."""

    def __init__(self, selector: selectors.BaseSelector, launcher: Launcher) -> None:
        self.selector = selector
        self.launcher = launcher
        self.port = socket.socket()  # for calls of other hosts: nothing listens there
        self.uncalled: list[tuple[str, int]] = []
        self.calls: dict[str, socket.socket] = {}  # that have not been answered yet
        self.most_calls = 0
        self.call_until = 0.0
        self.until: float | None = None

    def open(self) -> int:
        """Return the port at which other hosts may call this one."""
        self.port.bind(("", 0))  # any port, as gloo and NCCL use: past the same firewalls
        return int(self.port.getsockname()[1])

    def begin(self, hosts: list[tuple[str, int]], seconds: float) -> None:
        """Call other hosts at their ports."""
        for address in list(self.calls):
            self._end_call(address)
        now = time.monotonic()
        self.call_until, self.until = now + seconds / 2, now + seconds
        limit, used = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(names_in("/proc/self/fd"))
        self.most_calls = min(CALLS, limit - used - SPARE_DESCRIPTORS)
        self.uncalled = hosts[::-1]
        self._call_some(now)

    def report(self, now: float) -> None:
        """Report, after all answers or when time is up, the hosts that did not answer."""
        if self.until is None:
            return
        self._call_some(now)
        if not self.calls or now > self.until:
            self.until = None
            silent = sorted(self.calls)
            for address in silent:
                self._end_call(address)
            self.launcher.send_event(event="unreached", addresses=silent)

    def _call_some(self, now: float) -> None:
        # Only in the first half of the time: the last ones called need some to answer.
        while self.uncalled and len(self.calls) < self.most_calls and now < self.call_until:
            address, port = self.uncalled.pop()
            call = socket.socket(family_of(address))
            call.setblocking(False)
            self.calls[address] = call
            with contextlib.suppress(OSError):  # a name that means nothing here stays unanswered
                self._take_status(address, call.connect_ex((address, port)))

    def _take_status(self, address: str, problem: int) -> None:
        call = self.calls[address]
        if problem in (0, errno.ECONNREFUSED):  # both prove that packets go there and back
            self._end_call(address)
        elif problem == errno.EINPROGRESS:
            take = functools.partial(self._take, address)
            self.selector.register(call, selectors.EVENT_WRITE, take)

    def _take(self, address: str, descriptor: int) -> None:
        self.selector.unregister(descriptor)
        problem = self.calls[address].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._take_status(address, problem)

    def _end_call(self, address: str) -> None:
        call = self.calls.pop(address)
        with contextlib.suppress(KeyError):
            self.selector.unregister(call)
        call.close()
