"""The program that starts each rank's command, and reports how it ends.

torchrun starts it in place of the command, which it reads from the agent's private folder. So
torchrun sees neither the command's words nor its output nor its exit code.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any, NoReturn

from rackrun.launcher.remote.files import remove_folder
from rackrun.launcher.remote.processes import (
    ENDING,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    exit_status,
    kill_descendants,
    prctl,
    spawn,
)

NO_TORCHRUN = {
    "PET_MONITOR_INTERVAL": "rackrun has started torchrun already; start python train.py instead"
}
"""Set for ranks: a torchrun in their script would ignore RANK, and each would train alone.

torchrun takes its options from such variables, and refuses this one, which is no number.
"""

AGENT_SECONDS = 0.3  # for an agent to end after torchrun; it waits longer for shims


def main() -> None:
    """Run the command of the rank whose agent has this archive in its private folder."""
    shim = Shim(os.path.dirname(os.path.abspath(sys.argv[0])), int(os.environ["LOCAL_RANK"]))
    sys.exit(shim.run())


class Shim:
    """One rank, which ends with torchrun and with the agent."""

    def __init__(self, scratch: str, local: int) -> None:
        self.scratch = scratch
        self.local = local
        self.torchrun = os.getppid()  # another parent later on means that torchrun was killed
        self.rank_has_ended = False
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.connect(f"{scratch}/control")

    def run(self) -> int:
        """Run the command; return 0 for torchrun, and never if the command has failed."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # daemons of the rank become ours, to be ended with it
        for signum in ENDING:
            signal.signal(signum, self._take_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # which torchrun may not get
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # torchrun's death, which follows the agent's
        if os.getppid() != self.torchrun:  # it died before that
            self._abandon()
        rank = self._start_command()
        self._report(event="started", shim=os.getpid(), pid=rank)
        child, status = os.wait()
        while child != rank:  # a daemon that the rank has left
            child, status = os.wait()
        self.rank_has_ended = True
        code, number = exit_status(status)
        kill_descendants()  # what the rank left in the background holds its pipes and GPUs
        self._report(event="ended", code=code, signal=number)
        while code or number:
            # torchrun would end the others. The launcher decides that: the agent kills this shim,
            # or is gone, and torchrun with it, which is a signal.
            time.sleep(1.0)
        return 0

    def _start_command(self) -> int:
        """Start the command on the pipes of its rank; return its process id."""
        with open(f"{self.scratch}/command.json", "rb") as file:
            command = json.loads(file.read())
        if command["signalled_together"]:  # the launcher got these as well, and has the rank save
            for signum in (signal.SIGINT, signal.SIGHUP):
                signal.signal(signum, signal.SIG_IGN)  # here, and in the command
        null = os.open(os.devnull, os.O_RDWR)
        streams = (null, self._open_fifo("out"), self._open_fifo("err"))
        words, workdir = command["command"], command["workdir"]
        is_alone = os.environ["WORLD_SIZE"] == "1"
        environment = {**os.environ, **({} if is_alone else NO_TORCHRUN)}
        environment["PATH"] = path_with(sys.executable, environment.get("PATH", os.defpath))
        rank = spawn(words, environment, workdir, streams, signal.SIGKILL)
        for descriptor in streams:
            os.close(descriptor)
        return rank

    def _open_fifo(self, name: str) -> int:
        path = f"{self.scratch}/{self.local}.{name}"
        try:
            # Without a reader this fails at once; else it would wait for one for ever.
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            self._abandon()
        os.set_blocking(descriptor, True)
        return descriptor

    def _take_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getppid() != self.torchrun:
            self._abandon()  # nobody else could end the rank
        if not self.rank_has_ended:
            self._report(event="asked-to-stop", signal=signum)

    def _abandon(self) -> NoReturn:
        """End a rank that is no longer supervised, and all that it started."""
        # The agent's death is a signal, too: it would begin this again, amid an import.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        kill_descendants()
        if self._agent_is_gone():  # and nothing else removes its folder
            remove_folder(self.scratch)
        os._exit(1)

    def _agent_is_gone(self) -> bool:
        # It never writes: what can be read is the end. It may be killed right after torchrun.
        return bool(select.select([self.control], [], [], AGENT_SECONDS)[0])

    def _report(self, **message: Any) -> None:
        """Send the agent a message; end when it is gone."""
        try:
            self.control.send(json.dumps({**message, "local": self.local}).encode())
        except OSError:
            self._abandon()


def path_with(interpreter: str, path: str) -> str:
    """Return a PATH on which this interpreter is the first of its name.

    So a script that a rank runs finds it, as in an activated environment, and what is beside it.
    """
    folder, name = os.path.split(interpreter)
    for other in path.split(os.pathsep):
        if os.access(os.path.join(other, name), os.X_OK):
            return path if other == folder else f"{folder}{os.pathsep}{path}"
    return f"{folder}{os.pathsep}{path}"
