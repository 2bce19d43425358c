"""The host during a run: how busy it is, which processes are stopped, what its GPUs do."""

from __future__ import annotations

import os
from typing import Any

from rackrun.launcher.remote.agent.frames import USAGE_SECONDS, Launcher
from rackrun.launcher.remote.agent.ranks import LocalRanks
from rackrun.launcher.remote.agent.reports import Reports
from rackrun.launcher.remote.agent.torchrun_process import Torchrun
from rackrun.launcher.remote.agent.usage import UsageMeter
from rackrun.launcher.remote.processes import processor_ticks, state_of

COMPUTING_SHARE = 0.05
"""The part of a core or GPU that a rank uses if it computes; one that waits uses less."""


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
        self.every_seconds = min(USAGE_SECONDS, order["lease_seconds"] / 3)
        self.next_at = self.looked_at = 0.0
        self.ticks: dict[int, int] = {}  # pid of a rank -> its ticks on a processor, at `looked_at`
        self.usage = UsageMeter(dict(order["defaults"]).get("GLOO_SOCKET_IFNAME", ""))
        self.stopped: list[str] = []

    def report(self, now: float) -> bool:
        """Send the regular report, if it is time: utilization, stopped processes, the rendezvous.

        Return whether it was.
        """
        if now < self.next_at:
            return False
        self.next_at = now + self.every_seconds
        self.launcher.send_event(event="usage", **self.usage.measure(now))
        self._report_computing(now)
        self.look_for_stopped()
        self.torchrun.look_for_rendezvous(now, bool(self.ranks.by_local))
        return True

    def look_for_stopped(self) -> None:
        """Report when a process of the run was stopped, or continues."""
        torchrun = [("torchrun", self.torchrun.pid)] if self.torchrun.alive else []
        named = [*torchrun, *self.ranks.named()]
        stopped = [name for name, pid in named if state_of(pid) == "T"]
        if stopped != self.stopped:
            self.stopped = stopped
            self.launcher.send_event(event="frozen", names=stopped)

    def _report_computing(self, now: float) -> None:
        """Report which ranks have computed, of those that have not shown how long a step takes."""
        ranks = self.ranks.by_local
        reported = [local for local in self.reports.untimed if local in ranks]
        untimed = {local: ranks[local].pid for local in reported if not ranks[local].ended}
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
