"""The host during a run: how busy it is, which processes are stopped, what its GPUs do."""

from __future__ import annotations

import os
from typing import Any

from rackrun.launcher.remote.agent.frames import Launcher
from rackrun.launcher.remote.agent.ranks import LocalRanks
from rackrun.launcher.remote.agent.reports import Reports
from rackrun.launcher.remote.agent.torchrun import Torchrun
from rackrun.launcher.remote.agent.usage import UsageMeter
from rackrun.launcher.remote.processes import processor_ticks, state_of

COMPUTING_SHARE = 0.05
"""Of a core, or of a GPU, that a rank uses if it computes; one that waits uses less."""
USAGE_SECONDS = 3.0  # or a third of a short heartbeat timeout: it is also the agent's sign of life


class HostWatch:
    """Reports the utilization of this host, and the processes that were stopped."""

    def __init__(
        self,
        launcher: Launcher,
        torchrun: Torchrun,
        ranks: LocalRanks,
        reports: Reports,
        order: dict[str, Any],
    ) -> None:
        """Take the order to run, which has how long the launcher waits for a sign of life."""
        self.launcher = launcher
        self.torchrun = torchrun
        self.ranks = ranks
        self.reports = reports
        self.ticks: dict[int, int] = {}  # pid of a rank -> its ticks on a processor, at `looked_at`
        self.looked_at = 0.0
        interface = dict(order["defaults"]).get("GLOO_SOCKET_IFNAME", "")  # where ranks meet
        self.usage = UsageMeter(min(USAGE_SECONDS, order["lease_seconds"] / 3), interface)
        self.stopped: list[str] = []

    def due(self, now: float) -> bool:
        """Return whether it is time for a report."""
        return self.usage.due(now)

    def report(self, now: float) -> None:
        """Send the regular report: utilization, stopped processes, the rendezvous of torchrun."""
        self.launcher.send_event(event="usage", **self.usage.measure(now))
        self.report_computing(now)
        self.look_for_stopped()
        self.torchrun.look_for_it(now, bool(self.ranks.by_local))

    def look_for_stopped(self) -> None:
        """Report when a process of the run was stopped, or continues."""
        named_pids = [*self.ranks.named()]
        if self.torchrun.alive:
            named_pids.insert(0, ("torchrun", self.torchrun.pid))
        stopped = [name for name, pid in named_pids if state_of(pid) == "T"]
        if stopped != self.stopped:
            self.stopped = stopped
            self.launcher.send_event(event="frozen", names=stopped)

    def report_computing(self, now: float) -> None:
        """Report which ranks have computed, of those that have not shown how long a step takes."""
        untimed = {
            local: rank.pid
            for local, rank in self.ranks.by_local.items()
            if local in self.reports.untimed and not rank.ended
        }
        before, self.ticks = self.ticks, processor_ticks(untimed.values()) if untimed else {}
        least = COMPUTING_SHARE * (now - self.looked_at) * os.sysconf("SC_CLK_TCK")
        self.looked_at = now
        # Each rank uses the visible GPU at its local number.
        gpus, visible = self.usage.gpus, self.torchrun.environment.get("CUDA_VISIBLE_DEVICES")
        indices = sorted(gpus, key=int) if visible is None else visible.split(",")
        for local, pid in untimed.items():
            ran = self.ticks[pid] - before.get(pid, self.ticks[pid])
            index = indices[local] if local < len(indices) else ""
            gpu_computes = index in gpus and gpus[index]["busy"] > 100 * COMPUTING_SHARE
            if ran > least or gpu_computes:
                self.launcher.send_event(local, event="computing")
