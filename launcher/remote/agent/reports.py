"""Reports of the ranks on their progress: datagrams of JSON, passed on as they came."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from typing import Any

from rackrun.launcher.remote.agent.frames import READ_BYTES, REPORT, REPORT_BYTES, Launcher

REPORT_FIELDS = 64  # likewise, when several are kept for later
REPORTS_PER_TURN = 256  # a rank that reports in a tight loop gets no more of the agent's time


class Reports:
    """The socket that ranks report to, and what is still to be sent to the launcher."""

    def __init__(self, launcher: Launcher, first_rank: int, processes: int) -> None:
        """Take the ranks of this host: `processes` of them, from `first_rank` on."""
        self.launcher = launcher
        self.first_rank = first_rank
        self.processes = processes
        self.first_steps: dict[int, set[int]] = {}
        """The first two steps of each rank that has reported, by local rank."""
        self.late: dict[int, dict[str, Any]] = {}  # local rank -> what it has reported since
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    @property
    def untimed(self) -> list[int]:
        """Return the ranks that have reported, but not yet how long a step takes."""
        return [local for local, steps in self.first_steps.items() if len(steps) < 2]

    def listen(self, selector: selectors.BaseSelector, path: str) -> None:
        """Listen for reports at this path."""
        self.socket.bind(path)
        self.socket.setblocking(False)
        selector.register(self.socket, selectors.EVENT_READ, self.pass_on)

    def pass_on(self, descriptor: int = 0) -> None:
        """Pass on what has arrived; what is no report is dropped."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(REPORTS_PER_TURN):
                self._take(self.socket.recv(READ_BYTES))

    def _take(self, data: bytes) -> None:
        report = report_in(data)
        local, step = report.get("rank", -1) - self.first_rank, report.get("step")
        if not 0 <= local < self.processes:
            return
        steps = self.first_steps.setdefault(local, set())
        if len(steps) < 2 and isinstance(step, int) and step:
            steps.add(step)
        # A slow launcher gets the newest fields of each rank, later; never before older ones.
        if self.launcher.full or self.late:
            merged = {**self.late.get(local, {}), **report}
            self.late[local] = merged if len(merged) <= REPORT_FIELDS else report
        else:
            self.launcher.send(REPORT, local, data)

    def catch_up(self) -> None:
        """Send what a launcher that keeps up again has missed."""
        while self.late and not self.launcher.full:
            local, report = self.late.popitem()
            self.launcher.send(REPORT, local, json.dumps(report).encode())


def report_in(data: bytes) -> dict[str, Any]:
    """Return the report that a rank sent, with an integer as its rank; {} for anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        report = json.loads(data) if len(data) <= REPORT_BYTES else None
        if isinstance(report, dict) and isinstance(report.get("rank"), int):
            return report
    return {}
