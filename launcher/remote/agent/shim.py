"""The program that starts each rank's command, and reports how it ends.

torchrun starts it in place of the command, which it reads from the agent's private folder. So
torchrun sees neither the command's words nor its output nor its exit code.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from typing import Any, NoReturn

from rackrun.launcher.remote.agent.nonblocking import receive
from rackrun.launcher.remote.files import remove_folder
from rackrun.launcher.remote.processes import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    exit_status,
    kill_descendants,
    open_null,
    prctl,
    reaped,
    signal_pipe,
    spawn,
)


def main() -> None:
    """Run the command of the rank whose agent has this archive in its private folder."""
    sys.exit(run(os.path.dirname(os.path.abspath(sys.argv[0]))))


def run(scratch: str) -> int:
    """Run one rank's command; return 0 for torchrun, and never if the command has failed."""
    parent = os.getppid()  # torchrun; another number later on means that it was killed
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # daemons of the rank become ours, to be ended with it
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # wakes `watch` when torchrun is killed
    shim = Shim(scratch, int(os.environ["LOCAL_RANK"]))
    pid, signals = shim.start_command()
    shim.report(event="started", shim=os.getpid(), pid=pid)
    code, signum = shim.watch(pid, parent, signals)
    kill_descendants()  # what the rank left in the background holds its pipes and GPUs
    shim.report(event="ended", code=code, signal=signum)
    if code or signum:
        # torchrun would end the others. The launcher decides that: the agent kills this shim, or is
        # gone.
        shim.control.recv(1)
        shim.abandon()
    return 0


class Shim:
    """One rank's connection to the agent; when that ends, so does the rank."""

    def __init__(self, scratch: str, local: int) -> None:
        self.scratch = scratch
        self.local = local
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.connect(f"{scratch}/control")

    def start_command(self) -> tuple[int, int]:
        """Start the command on the pipes of its rank; return its process id and a signal pipe."""
        with open(f"{self.scratch}/command.json", "rb") as file:
            command = json.loads(file.read())
        out, err = self._open_fifo("out"), self._open_fifo("err")
        signals = signal_pipe()
        with open_null() as null:
            streams = (null, out, err)
            pid = spawn(
                command["command"],
                dict(os.environ),
                command["workdir"],
                streams,
                signal.SIGKILL,
            )
        os.close(out)
        os.close(err)
        return pid, signals

    def _open_fifo(self, name: str) -> int:
        path = f"{self.scratch}/{self.local}.{name}"
        try:
            # Without a reader this fails at once; else it would wait for one for ever.
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            self.abandon()
        os.set_blocking(descriptor, True)
        return descriptor

    def watch(self, pid: int, parent: int, signals: int) -> tuple[int, int]:
        """Return code and signal of the command's end; kill it when agent or torchrun is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(signals, selectors.EVENT_READ)
            selector.register(self.control, selectors.EVENT_READ)
            while True:
                for child, status in reaped():
                    if child == pid:
                        return exit_status(status)
                if os.getppid() != parent:  # torchrun is gone, and can end no rank any more
                    self.abandon()
                for key, _ in selector.select():
                    if key.fd != signals:
                        self.abandon()  # the agent never writes: its end has closed
                    asked = set(os.read(signals, 4096)) - {int(signal.SIGCHLD)}
                    if asked and os.getppid() == parent:
                        self.report(event="asked-to-stop", signal=min(asked))

    def abandon(self) -> NoReturn:
        """End a rank that is no longer supervised, and all that it started."""
        kill_descendants()
        self.control.setblocking(False)
        if receive(self.control) == b"":  # the agent is gone, and nothing else removes its folder
            remove_folder(self.scratch)
        os._exit(1)

    def report(self, **message: Any) -> None:
        """Send the agent a message; end when it is gone."""
        try:
            self.control.send(json.dumps({**message, "local": self.local}).encode())
        except OSError:
            self.abandon()
