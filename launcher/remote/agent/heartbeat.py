"""The heartbeat of the launcher: a run does not outlive it."""

from __future__ import annotations

import contextlib
import os
import time

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    from launcher.remote.agent.frames import Launcher


class HeartbeatMonitor:
    """Tracks when the launcher last sent something, and how long it may be silent."""

    def __init__(self, launcher: Launcher, guard: int, timeout_seconds: float) -> None:
        """Take the process id of the guard, the agent's parent."""
        self.launcher = launcher
        self.guard = guard
        self.timeout_seconds = timeout_seconds

    def problem(self, now: float) -> str:
        """Return why the run must end, a silent launcher for one; empty while it may continue."""
        if os.getppid() != self.guard:
            return "the guard of the agent was killed"
        if self.launcher.is_gone:
            return "the launcher is gone"
        if now - self.launcher.heard_at > self.timeout_seconds:
            return f"no heartbeat from the launcher for {self.timeout_seconds:g} s"
        return ""

    def show(self, now: float, scratch: str, locks: dict[str, int]) -> None:
        """Give agent.pid the time of the last heartbeat, for `status`; keep locks young."""
        heard = time.time() - (now - self.launcher.heard_at)
        with contextlib.suppress(OSError):
            os.utime(f"{scratch}/agent.pid", (heard, heard))
        for descriptor in locks.values():  # systemd-tmpfiles removes what is old from /tmp
            with contextlib.suppress(OSError):  # another user's file: only its owner may do that
                os.utime(descriptor)
