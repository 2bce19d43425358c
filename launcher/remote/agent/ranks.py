"""The ranks of this host, as their shims report them."""

from __future__ import annotations

import contextlib
import functools
import json
import selectors
import signal
import socket

from launcher.remote.agent.descriptors import receive
from launcher.remote.agent.shim import AGAIN
from launcher.remote.agent.usage import oom_kills
from launcher.remote.processes import look_up, send_signal

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from launcher.remote.agent.frames import Launcher
    from launcher.remote.agent.membership import RankSockets


class LocalRank:
    """State of one rank: its shim, and the command that the shim started."""

    def __init__(self, connection: socket.socket, shims: list[int], pid: int) -> None:
        """Take the process ids of the shim, and of the rank's parent if that is another."""
        self.connection = connection
        self.shims = shims
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

    def __init__(
        self,
        launcher: Launcher,
        first_rank: int,
        signalled_together: bool,
        membership: RankSockets | None,
    ) -> None:
        """Take whether a signal that reaches a rank reaches the launcher as well.

        `membership` is that of the ranks of an elastic run.
        """
        self.launcher = launcher
        self.first_rank = first_rank
        self.signalled_together = signalled_together
        self.membership = membership
        self.by_local: dict[int, LocalRank] = {}
        self.last_signal = 0  # sent to all ranks, also to those that start later
        self.killing = False  # once True, every end is the agent's doing
        self.oom_kills = oom_kills()

    def open(self, selector: selectors.BaseSelector, path: str, processes: int) -> None:
        """Listen for shims at this path."""
        self.selector = selector
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.bind(path)
        self.control.listen(processes)
        self.control.setblocking(False)
        selector.register(self.control, selectors.EVENT_READ, self._accept)

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
                for shim in rank.shims:
                    yield f"the shim of rank {self.first_rank + local}", shim

    def ask_to_end(self, signum: int) -> None:
        """Send every rank a signal; a rank that starts later gets it as well."""
        self.last_signal = signum
        for rank in self:
            rank.ask_to_end(signum)

    def start_again(self, local: int) -> None:
        """Have the shim of a rank that has ended start its command again."""
        rank = self.by_local.get(local)
        if rank is not None and rank.ended and not self.killing:
            with contextlib.suppress(OSError):  # the shim has died
                rank.connection.send(AGAIN)

    def kill(self, local: int) -> None:
        """Kill a rank that does not react any more; its shim reports that."""
        rank = self.by_local.get(local)
        if rank is not None:
            rank.ask_to_end(signal.SIGKILL)

    def _accept(self, descriptor: int) -> None:
        """Watch the connections of new shims, and take what they have sent already."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self.control.accept()
                connection.setblocking(False)
                take = functools.partial(self._take, connection)
                self.selector.register(connection, selectors.EVENT_READ, take)
                take(connection.fileno())

    def _take(self, connection: socket.socket, descriptor: int) -> None:
        """Take a shim's messages: its command started or ended; or the shim is gone."""
        data = receive(connection)
        while data:
            self._pass_on(connection, json.loads(data))
            data = receive(connection)
        if data == b"":
            self.selector.unregister(connection)
            connection.close()
            self._lose(connection)

    def _pass_on(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Remember what a shim sent, and pass it on."""
        local = message.pop("local")
        if message["event"] == "asked-to-stop" and self.signalled_together:
            return
        if message["event"] == "started":
            self.by_local[local] = LocalRank(connection, message.pop("shims"), message["pid"])
            self.by_local[local].ask_to_end(self.last_signal)
        if message["event"] == "ended":
            self._close_membership(local)
            message["ordered"] = self._by_us(self.by_local[local])
            self.by_local[local].ended = True
            message["oom"] = message["signal"] == signal.SIGKILL and oom_kills() > self.oom_kills
        self.launcher.send_event(local, **message)

    def _lose(self, connection: socket.socket) -> None:
        """Report the end of a rank whose shim has died: the kernel killed its command with it."""
        for local, rank in self.by_local.items():
            if rank.connection is connection and not rank.ended:
                rank.ended = True
                self._close_membership(local)
                killed = {"code": 0, "signal": int(signal.SIGKILL), "ordered": self._by_us(rank)}
                self.launcher.send_event(local, event="ended", **killed)

    def _close_membership(self, local: int) -> None:
        """Send the launcher a rank's last messages about its group before its end."""
        if self.membership:
            self.membership.close(local)

    def _by_us(self, rank: LocalRank) -> bool:
        """Return True if the agent has caused the end of a rank."""
        return rank.signalled or self.killing
