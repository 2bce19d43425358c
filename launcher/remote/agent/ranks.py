"""The ranks of this host, as their shims report them."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator

from rackrun.launcher.remote.agent.frames import Launcher
from rackrun.launcher.remote.agent.nonblocking import LocalSocket
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

    def ask_to_end(self, signum: int) -> None:
        """Send the command a signal, unless it ended by itself: 0 is no signal."""
        if signum and not self.ended and look_up(self.pid):
            self.signalled = True
            send_signal(self.pid, signum)


class LocalRanks:
    """The socket that shims call, and the ranks whose shims have called."""

    def __init__(self, launcher: Launcher, first_rank: int, signalled_together: bool) -> None:
        """Take whether a signal that reaches a rank reaches the launcher as well."""
        self.launcher = launcher
        self.first_rank = first_rank
        self.signalled_together = signalled_together
        self.socket = LocalSocket(self._take, self._lose)
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

    def _take(self, connection: socket.socket, data: bytes) -> None:
        """Take what a shim reports: its command started or ended, or torchrun signalled it."""
        message = json.loads(data)
        local = message.pop("local")
        if message["event"] == "asked-to-stop" and self.signalled_together:
            return  # the launcher got the signal itself
        if message["event"] == "started":
            self.by_local[local] = LocalRank(connection, message.pop("shim"), message["pid"])
            self.by_local[local].ask_to_end(self.last_signal)
        if message["event"] == "ended":
            by_kernel = message["signal"] == signal.SIGKILL and oom_kills() > self.oom_kills
            self._end(local, oom=by_kernel, **message)
        else:
            self.launcher.send_event(local, **message)

    def _lose(self, connection: socket.socket) -> None:
        for local, rank in self.by_local.items():
            if rank.connection is connection and not rank.ended:
                # The shim has died without a word: the kernel killed its command with it.
                self._end(local, event="ended", code=0, signal=int(signal.SIGKILL))

    def _end(self, local: int, **event: object) -> None:
        rank = self.by_local[local]
        rank.ended = True
        self.launcher.send_event(local, ordered=rank.signalled or self.killing, **event)
