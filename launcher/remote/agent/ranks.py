"""The ranks of this host, as their shims report them over a socket."""

from __future__ import annotations

import contextlib
import functools
import json
import selectors
import signal
import socket
from collections.abc import Iterator
from typing import Any

from rackrun.launcher.remote.agent.frames import READ_BYTES, Launcher
from rackrun.launcher.remote.processes import look_up, oom_kills, send_signal


class LocalRank:
    """State of one rank: its shim, and the command that the shim started."""

    def __init__(self, connection: socket.socket, shim: int, pid: int) -> None:
        """Take the process ids of the shim and of its command."""
        self.connection = connection
        self.shim = shim
        self.pid = pid
        self.ended = False
        self.signalled = False
        self.has_signal = 0  # that a scheduler has sent to all processes

    def ask_to_end(self, signum: int) -> None:
        """Send the command a signal that it has not got, unless it ended by itself: 0 is none."""
        if signum and not self.ended and look_up(self.pid):
            self.signalled = True
            if signum != self.has_signal:
                send_signal(self.pid, signum)


class LocalRanks:
    """The socket that shims call, and the ranks whose shims have called."""

    def __init__(self, launcher: Launcher, first_rank: int, signalled_together: bool) -> None:
        """Take whether a signal that reaches a rank reaches the launcher as well."""
        self.launcher = launcher
        self.first_rank = first_rank
        self.signalled_together = signalled_together
        self.by_local: dict[int, LocalRank] = {}
        self.last_signal = 0  # sent to all ranks, also to those that start later
        self.killing = False  # once True, every end is the agent's doing
        self.oom_kills = oom_kills()

    def __iter__(self) -> Iterator[LocalRank]:
        return iter(self.by_local.values())

    @property
    def unfinished(self) -> bool:
        """Return True while a started rank runs."""
        return any(not rank.ended for rank in self)

    def named(self) -> Iterator[tuple[str, int]]:
        """Yield the processes that run, with their names for people."""
        for local, rank in sorted(self.by_local.items()):
            if not rank.ended:
                yield f"rank {self.first_rank + local}", rank.pid
                yield f"the shim of rank {self.first_rank + local}", rank.shim

    def ask_to_end(self, signum: int) -> None:
        """Send every rank a signal; a rank that starts later gets it as well."""
        self.last_signal = signum
        for rank in self:
            rank.ask_to_end(signum)

    # -- their shims

    def listen(self, selector: selectors.BaseSelector, path: str, processes: int) -> None:
        """Listen at this path, on a socket that keeps messages apart."""
        self.selector = selector
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(processes)
        self.listener.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def _accept(self, descriptor: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self.listener.accept()
                connection.setblocking(False)
                read = functools.partial(self._read, connection)
                self.selector.register(connection, selectors.EVENT_READ, read)
                read(connection.fileno())  # in this turn, which may be that of torchrun's end

    def _read(self, connection: socket.socket, descriptor: int) -> None:
        """Take all messages that have arrived, and the end of a shim."""
        try:
            while message := connection.recv(READ_BYTES):
                self._take(connection, json.loads(message))
        except BlockingIOError:
            return
        except ConnectionError:
            pass
        self.selector.unregister(connection)
        connection.close()
        for local, rank in self.by_local.items():
            if rank.connection is connection and not rank.ended:
                # The shim has died without a word: the kernel killed its command with it.
                self._end(local, event="ended", code=0, signal=int(signal.SIGKILL))

    def _take(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Take what a shim reports: its command started or ended, or torchrun signalled it."""
        local = message.pop("local")
        if message["event"] == "asked-to-stop" and self.signalled_together:
            if local in self.by_local:  # the launcher got the signal itself, and so did the command
                self.by_local[local].has_signal = message["signal"]
            return
        if message["event"] == "started":
            self.by_local[local] = LocalRank(connection, message.pop("shim"), message["pid"])
            self.by_local[local].ask_to_end(self.last_signal)
        if message["event"] == "ended":
            by_kernel = message["signal"] == signal.SIGKILL and oom_kills() > self.oom_kills
            self._end(local, oom=by_kernel, **message)
        else:
            self.launcher.send_event(local, **message)

    def _end(self, local: int, **event: object) -> None:
        rank = self.by_local[local]
        rank.ended = True
        self.launcher.send_event(local, ordered=rank.signalled or self.killing, **event)
