"""The torchrun process of this host: started, watched until its rendezvous, its end reported.

Its command line is part of the plan (launcher/run/torchrun_command.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from rackrun.contract import variables
from rackrun.launcher.remote.agent.frames import ERR, OUT, Launcher
from rackrun.launcher.remote.agent.output import RankOutput
from rackrun.launcher.remote.processes import (
    ENDING,
    descendants,
    exit_status,
    link_target,
    names_in,
    oom_kills,
    raise_limits,
    reaped,
    spawn,
)

JOIN_SECONDS = 3.0  # torchrun takes that long to start, and each look at /proc costs time
ESTABLISHED = "01"  # in /proc/net/tcp

FOREIGN_PREFIXES = ("PET_", variables.PREFIX, "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_")
FOREIGN_NAMES = frozenset(
    ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR")
    + ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_PORT")
)


class Torchrun:
    """The one torchrun of this host."""

    def __init__(self, order: dict[str, Any], launcher: Launcher) -> None:
        self.argv: list[str] = order["torchrun"]
        self.environment = environment(order)
        self.signalled_together: bool = order["signalled_together"]
        self.launcher = launcher
        self.pid = 0
        self.alive = False
        self.oom_kills = oom_kills()
        self.joined = False  # connected to the torchrun of the first host, or past that
        self.look_at = float("inf")

    def start(self, output: RankOutput) -> None:
        """Start torchrun, with its own output on pipes of the agent."""
        raise_limits()  # loader workers of PyTorch die of the usual 1,024 open files
        null = os.open(os.devnull, os.O_RDWR)
        streams = (null, output.open_pipe(OUT), output.open_pipe(ERR))
        # At a signal, torchrun kills ranks after 30 s; blocked here, none reaches it.
        ours = ENDING if self.signalled_together else ()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
        # Not in the workdir: `python -c` would import the user's modules before its own.
        self.pid = spawn(self.argv, self.environment, "/", streams, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for descriptor in streams:
            os.close(descriptor)
        self.alive = True
        self.look_at = time.monotonic() + JOIN_SECONDS

    def reap(self, asked_to_end: bool) -> None:
        """Take the exit status of torchrun, and of orphans that the agent has inherited."""
        for pid, status in reaped():
            if pid == self.pid:
                self.alive = False
                code, signum = exit_status(status)
                end = {"code": code, "signal": signum, "ordered": asked_to_end}
                oom = signum == signal.SIGKILL and oom_kills() > self.oom_kills
                self.launcher.send_event(event="torchrun-ended", oom=oom, **end)

    def look_for_rendezvous(self, now: float, has_ranks: bool) -> None:
        """Report, once, that the rendezvous is over: ranks start only then."""
        if not self.joined and self.alive and now > self.look_at:
            options = dict(arg.partition("=")[::2] for arg in self.argv)
            self.joined = has_ranks or is_connected(self.pid, int(options["--master-port"]))
            if self.joined:
                self.launcher.send_event(event="joined")


def environment(order: dict[str, Any]) -> dict[str, str]:
    """Return the host's own variables, without another launcher's, and then the plan's."""
    mine = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN_NAMES and not name.startswith(FOREIGN_PREFIXES)
    }
    # Below sshd, the bash of some systems reads ~/.bashrc again at SHLVL 0, even for `bash -c`.
    ours = {"SHLVL": "1", **dict(order["environment"])}
    return {**dict(order["defaults"]), **mine, **ours}


def is_connected(pid: int, port: int) -> bool:
    """Return True if a process, or a descendant, has a connection to or from a port."""
    sockets = connections(port)
    return bool(sockets) and any(
        link_target(f"/proc/{each}/fd/{number}") in sockets
        for each in (pid, *(process.pid for process in descendants(pid)))
        for number in names_in(f"/proc/{each}/fd")
    )


def connections(port: int) -> set[str]:
    """Return the sockets connected to or from a port, as links in /proc name them."""
    sockets = set()
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{family}") as file:
            for line in file.readlines()[1:]:
                _, local, remote, state, *_, inode = line.split()[:10]
                ports = [int(address.rpartition(":")[2], 16) for address in (local, remote)]
                if state == ESTABLISHED and port in ports:
                    sockets.add(f"socket:[{inode}]")
    return sockets
