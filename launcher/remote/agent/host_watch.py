"""The host during a run: how busy it is, which processes are stopped, what its GPUs do."""

from __future__ import annotations

import os
import selectors
import signal
from functools import partial

from launcher.remote.agent.descriptors import read_some
from launcher.remote.agent.usage import UsageMeter
from launcher.remote.holders import waiter
from launcher.remote.locks import impatient_ticket
from launcher.remote.processes import open_null, processor_ticks, spawn, state_of

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    from launcher.remote.agent.frames import Launcher
    from launcher.remote.agent.ranks import LocalRanks
    from launcher.remote.agent.reports import Reports
    from launcher.remote.agent.torchrun import Torchrun

COMPUTING_SHARE = 0.05
"""Of a core, or of a GPU, that a rank uses if it computes; one that waits uses less."""
USAGE_SECONDS = 3.0  # or a third of a short heartbeat timeout: it is also the agent's sign of life
AWAITED_SECONDS = 30.0  # between two reports that a launch waits
GPU_QUERY = "--query-gpu=index,utilization.gpu,memory.used,memory.total"
GPU_HEALTH = ",temperature.gpu,power.draw,clocks_throttle_reasons.active"
"""The last one by its older name, which newer drivers know as well."""
GPU_FORMAT = ("--format=csv,noheader,nounits", "--loop-ms=3000")


class HostWatch:
    """Reports the utilization of this host, and the processes that were stopped."""

    def __init__(
        self,
        launcher: Launcher,
        torchrun: Torchrun,
        ranks: LocalRanks,
        reports: Reports,
        heartbeat_seconds: float,
        defaults: dict[str, str],
        held: list[tuple[str, bool]],
    ) -> None:
        """Take how long the launcher waits for a sign of life.

        `defaults` may have the network device of the ranks. `held` are the locks of a run that
        gives way to launches that wait for them.
        """
        self.launcher = launcher
        self.torchrun = torchrun
        self.ranks = ranks
        self.reports = reports
        interface = defaults.get("GLOO_SOCKET_IFNAME", "")
        self.ticks: dict[int, int] = {}  # pid of a rank -> its ticks on a processor, at `looked_at`
        self.looked_at = 0.0
        self.usage = UsageMeter(min(USAGE_SECONDS, heartbeat_seconds / 3), interface)
        self.stopped: list[str] = []
        self.held = held
        self.ticket = ""
        self.told_until = 0.0

    def due(self, now: float) -> bool:
        """Return whether it is time for a report."""
        return self.usage.due(now)

    def report(self, now: float) -> None:
        """Send the regular report: utilization, stopped processes, the rendezvous of torchrun."""
        self.launcher.send_event(event="usage", **self.usage.measure(now))
        self.report_computing(now)
        self.look_for_stopped()
        self.look_for_waiters(now)
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

    def look_for_waiters(self, now: float) -> None:
        """Report who waits for this host; at the second look, as many take it without waiting."""
        if not self.held or now < self.told_until:
            return
        before, self.ticket = self.ticket, impatient_ticket(self.held)
        waiting = waiter(self.ticket) if self.ticket and self.ticket == before else None
        if waiting is not None:
            self.told_until = now + AWAITED_SECONDS  # then whoever waits has got a host, or has not
            self.launcher.send_event(event="awaited", user=waiting["user"])

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
        for local, pid in untimed.items():
            ran = self.ticks[pid] - before.get(pid, self.ticks[pid])
            if ran > least or self._is_gpu_busy(local):
                self.launcher.send_event(local, event="computing")

    def _is_gpu_busy(self, local: int) -> bool:
        """Return whether the GPU of a rank computes; torch gives ranks the visible ones in turn."""
        gpus, visible = self.usage.gpus, self.torchrun.environment.get("CUDA_VISIBLE_DEVICES")
        indices = sorted(gpus, key=int) if visible is None else visible.split(",")
        index = indices[local] if local < len(indices) else ""
        return index in gpus and gpus[index]["busy"] > 100 * COMPUTING_SHARE

    def watch_gpus(self, selector: selectors.BaseSelector) -> None:
        """Start an nvidia-smi that prints a line per GPU every few seconds, where there is one."""
        paths = [os.path.join(folder, "nvidia-smi") for folder in os.get_exec_path()]
        program = next((path for path in paths if os.access(path, os.X_OK)), None)
        if program is None:
            return
        self.selector = selector
        self.queries = [GPU_QUERY, GPU_QUERY + GPU_HEALTH]
        self._ask(program)

    def _ask(self, program: str) -> None:
        """Start nvidia-smi with the next query; one that it refuses ends it at once."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        with open_null() as null:
            streams, args = (null, writing, null), [program, self.queries.pop(), *GPU_FORMAT]
            spawn(args, dict(os.environ), "/", streams, signal.SIGKILL)
        os.close(writing)
        self.selector.register(reading, selectors.EVENT_READ, partial(self._take_gpus, program))

    def _take_gpus(self, program: str, descriptor: int) -> None:
        """Take what nvidia-smi prints; it may also end, without harm."""
        data = read_some(descriptor)
        if data == b"":
            self.selector.unregister(descriptor)
            os.close(descriptor)
            if self.queries and not self.usage.gpus:
                self._ask(program)
        elif data:
            self.usage.take_gpus(data)
