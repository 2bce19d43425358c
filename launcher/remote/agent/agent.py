"""The program that runs on each host: starts torchrun, relays what happens, leaves nothing running.

    launcher ──orders──▶ agent ──▶ torchrun ──▶ shim, one per rank ──▶ the rank's command
             ◀──frames──

Four things keep a run from outliving its launcher:

1. Standard input carries a heartbeat: its end, or silence for too long, ends the run.
2. The agent is a child subreaper: what a rank starts and leaves running becomes the agent's child,
   and is ended by walking /proc down from the agent, by pid and start time.
3. The kernel kills torchrun when the agent dies, has a shim end its rank when torchrun dies, and
   kills a rank's command when its shim dies.
4. A second agent ends what a killed one has left: what has the run's mark in its environment.

Output comes over pipes of the agent's own, so no orphan holds the launcher's stream.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from typing import Any

from rackrun.launcher.remote.agent.frames import Launcher
from rackrun.launcher.remote.agent.host_watch import HostWatch
from rackrun.launcher.remote.agent.output import RankOutput
from rackrun.launcher.remote.agent.ranks import LocalRanks
from rackrun.launcher.remote.agent.reachability import Reachability
from rackrun.launcher.remote.agent.reports import Reports
from rackrun.launcher.remote.agent.shutdown import HostShutdown, sweep
from rackrun.launcher.remote.agent.torchrun_process import Torchrun
from rackrun.launcher.remote.files import explained, remove_folder, write_new
from rackrun.launcher.remote.locks import lock, release
from rackrun.launcher.remote.processes import (
    ENDING,
    PR_SET_CHILD_SUBREAPER,
    prctl,
    signal_pipe,
)
from rackrun.launcher.remote.run_processes import IDENTITY_FILE, identity


def carry_out(order: dict[str, Any]) -> None:
    """Supervise the ranks of a run on this host, or end what is left of one."""
    for signum in ENDING:
        signal.signal(signum, lambda number, frame: None)  # they arrive through the wakeup pipe
    launcher = Launcher()
    is_sweep = order["do"] == "sweep"
    survivors = sweep(order["scratch"]) if is_sweep else Agent(order, launcher).run()
    launcher.send_event(event="closed", survivors=survivors)
    launcher.flush_all()


class Agent:
    """One run on this host, from the order to the moment when nothing of it is left."""

    def __init__(self, order: dict[str, Any], launcher: Launcher) -> None:
        """Take the plan of this host and the limits."""
        self.order = order
        self.scratch: str = order["scratch"]
        self.launcher = launcher
        self.selector = selectors.DefaultSelector()
        self.locks: dict[str, int] = {}  # path -> descriptor, held as long as this process lives
        first, processes = order["first_rank"], order["processes"]
        self.output = RankOutput(self.selector, launcher)
        self.reports = Reports(launcher, first, processes)
        self.ranks = LocalRanks(launcher, first, order["signalled_together"])
        self.torchrun = Torchrun(order, launcher)
        self.host = HostWatch(launcher, self.torchrun, self.ranks, self.reports, order)
        self.reachability = Reachability(launcher)
        self.shutdown = HostShutdown(launcher, self.torchrun, self.ranks)

    def run(self) -> list[str]:
        """Start, relay until the stop; return the names of processes that could not be ended."""
        try:
            self._prepare()
        except OSError as error:
            reason = f"cannot prepare the run: {explained(error)}"
            self.launcher.send_event(event="refused", reason=reason)
        else:
            self._relay_all()
        for descriptor in self.locks.values():
            os.close(descriptor)
        return self.shutdown.survivors

    def _relay_all(self) -> None:
        try:
            self._start()
            while not self.shutdown.done:
                self._turn()
            # No rank lives, but the last lines of one that failed may still be in its pipes.
            self.output.drain()
            self.reports.pass_on()
            self.reports.catch_up()
        finally:
            remove_folder(self.scratch)

    def _turn(self) -> None:
        """Wait for events, pass them on, and act on the times that have come."""
        ready = self.selector.select(self.shutdown.wait_seconds)
        # Signals last: what shims have sent must reach the launcher before the end of torchrun.
        for key, _ in sorted(ready, key=lambda pair: pair[0].fd == self.signals):
            key.data(key.fd)
        now = time.monotonic()
        if problem := self._why_unsupervised(now):
            self.shutdown.abandon(problem)
        if self.host.report(now):
            self._touch_files()
        self.reachability.report(now)
        self.shutdown.advance(now)
        self.output.balance()  # ranks wait rather than the agent's memory grows
        self.reports.catch_up()

    # -- the beginning

    def _prepare(self) -> None:
        run, name = self.scratch.split("-")[1], os.path.basename(self.order["folder"])
        for path, shared in self.order["locks"]:
            self.locks[path] = lock(path, shared, run, name)
        release()  # our place in the queue, and what the launch has only tried
        if not os.path.isdir(self.order["workdir"]):
            raise FileNotFoundError(f"no folder {self.order['workdir']} on this host")
        mode = 0o777 if self.order["share"] else 0o700  # of the last folder; of others: the umask
        os.makedirs(self.order["folder"], mode, exist_ok=True)
        # It must be new: another account may have put something there.
        os.mkdir(self.scratch, 0o700)
        try:
            self._write_scratch()
        except OSError as error:
            remove_folder(self.scratch)
            error.filename = error.filename or self.scratch  # a write to a full disk has no name
            raise

    def _write_scratch(self) -> None:
        # For a sweep: who runs here. For the shims: their program and the command.
        own = json.dumps(identity(os.getpid())).encode()
        write_new(f"{self.scratch}/{IDENTITY_FILE}", own)
        with open(sys.path[0], "rb") as archive:  # in which this program came
            write_new(f"{self.scratch}/agent.zip", archive.read())
        if self.order["container"]:
            write_new(f"{self.scratch}/container", b"")  # so that a sweep removes the container
        of_shims = ("command", "workdir", "signalled_together")
        command = {name: self.order[name] for name in of_shims}
        write_new(f"{self.scratch}/command.json", json.dumps(command).encode())

    def _start(self) -> None:
        """Open all inputs, then start torchrun: its shims call as soon as they are started."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # daemons of ranks become children of ours, to be ended
        if self.order["signalled_together"]:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # here, and in all children
        self.signals = signal_pipe()  # so that one selector waits for everything
        self.selector.register(self.signals, selectors.EVENT_READ, self._take_signals)
        self.selector.register(0, selectors.EVENT_READ, self._take_orders)
        processes = self.order["processes"]
        self.ranks.listen(self.selector, f"{self.scratch}/control", processes)
        self.reports.listen(self.selector, f"{self.scratch}/reports")
        port = self.reachability.open()
        for local in range(processes):
            self.output.open_rank(self.scratch, local)
        self.torchrun.start(self.output)
        self.host.usage.watch_gpus(self.selector)
        self.launcher.send_event(event="opened", port=port)
        self._take_orders(0)  # one may have been read together with the first order

    # -- the launcher, without which the run must end

    def _why_unsupervised(self, now: float) -> str:
        """Return why this host must end its run by itself; empty while a launcher supervises it."""
        if self.launcher.is_gone:
            return "the launcher is gone"
        if now - self.launcher.heard_at > self.order["lease_seconds"]:
            return f"no heartbeat from the launcher for {self.order['lease_seconds']:g} s"
        return ""

    def _touch_files(self) -> None:
        """Keep what a sweep and other launches need: systemd-tmpfiles removes old files in /tmp."""
        files: list[str | int] = [f"{self.scratch}/{IDENTITY_FILE}", *self.locks.values()]
        for file in files:
            with contextlib.suppress(OSError):  # another user's lock: only its owner may do that
                os.utime(file)

    # -- what comes in

    def _take_orders(self, descriptor: int) -> None:
        for order in self.launcher.orders():  # a heartbeat only has to arrive
            if order["do"] == "stop":
                self.shutdown.stop(order["signal"], order["grace_seconds"])
            elif order["do"] == "reach":
                # The launcher looks for the cause of a hang: it must not wait for the next report.
                self.host.look_for_stopped()
                self.reachability.begin(order["ports"], order["seconds"])
        if self.launcher.is_gone:
            self.selector.unregister(descriptor)  # at its end it would be ready in every turn

    def _take_signals(self, descriptor: int) -> None:
        for number in os.read(descriptor, 4096):
            if number == signal.SIGCHLD:
                self.torchrun.reap(self.shutdown.begun)
            elif not self.order["signalled_together"]:  # else the launcher has received it as well
                self.shutdown.abandon(f"the agent got {signal.Signals(number).name}")
