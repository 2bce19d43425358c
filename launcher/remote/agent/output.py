"""Output of the ranks and of torchrun, relayed no faster than the launcher reads."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors

from rackrun.launcher.remote.agent.frames import ERR, NO_RANK, OUT, Launcher, read_some

F_SETPIPE_SZ = 1031
PIPE_BYTES = 1 << 20


class RankOutput:
    """Pipes between ranks and agent, so that no orphan holds the launcher's stream."""

    def __init__(self, selector: selectors.BaseSelector, launcher: Launcher) -> None:
        self.selector = selector
        self.launcher = launcher
        self.pipes: dict[int, tuple[int, int]] = {}  # descriptor -> kind, local rank
        self.flushing = False  # something waits for the launcher
        self.paused = False  # the launcher does not keep up: the ranks' pipes are left alone

    def open_rank(self, scratch: str, local: int) -> None:
        """Make the two pipes that a rank's shim opens by name."""
        for kind, name in ((OUT, "out"), (ERR, "err")):
            path = f"{scratch}/{local}.{name}"
            os.mkfifo(path, 0o600)
            # Open for writing here too, the pipe does not end between two writers.
            self._relay(os.open(path, os.O_RDWR), kind, local)

    def open_pipe(self, kind: int) -> int:
        """Make a pipe for torchrun's own output; return the end that torchrun writes to."""
        reading, writing = os.pipe()
        self._relay(reading, kind, NO_RANK)
        return writing

    def _relay(self, descriptor: int, kind: int, local: int) -> None:
        os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # the user's share of pipe memory may be used up
            fcntl.fcntl(descriptor, F_SETPIPE_SZ, PIPE_BYTES)
        self.pipes[descriptor] = (kind, local)
        self.selector.register(descriptor, selectors.EVENT_READ, self.pass_on)

    def pass_on(self, descriptor: int) -> None:
        """Pass on what a rank or torchrun wrote, unchanged."""
        kind, local = self.pipes[descriptor]
        data = read_some(descriptor)
        if data:
            self.launcher.send(kind, local, data)
        elif data == b"":  # torchrun's pipe: no writer is left
            self.selector.unregister(descriptor)
            self.pipes.pop(descriptor)
            os.close(descriptor)

    def balance(self) -> None:
        """Watch for room in the launcher's stream, and stop reading from ranks while it is full."""
        if bool(self.launcher.waiting) != self.flushing:
            self.flushing = not self.flushing
            if self.flushing:
                self.selector.register(1, selectors.EVENT_WRITE, lambda fd: self.launcher.flush())
            else:
                self.selector.unregister(1)
        if self.launcher.full != self.paused:
            self.paused = self.launcher.full
            for descriptor in self.pipes:  # unread, they fill up, and the ranks wait
                if self.paused:
                    self.selector.unregister(descriptor)
                else:
                    self.selector.register(descriptor, selectors.EVENT_READ, self.pass_on)

    def drain(self) -> None:
        """Pass on what is left in the pipes, which have no writers any more."""
        for descriptor, (kind, local) in self.pipes.items():
            data = read_some(descriptor)
            while data:
                self.launcher.send(kind, local, data)
                if self.launcher.full:
                    self.launcher.flush_all()
                data = read_some(descriptor)
