"""The end of a run on this host: ranks are asked, then everything they started is killed."""

from __future__ import annotations

import os
import signal
import time

from launcher.remote.processes import KILL_SECONDS, descendants, kill, send_signal

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    from launcher.remote.agent.frames import Launcher
    from launcher.remote.agent.ranks import LocalRanks
    from launcher.remote.agent.torchrun import Torchrun
    from launcher.remote.processes import Process

ORPHAN_GRACE_SECONDS = 3.0  # the launcher is gone: ranks may save, but not for long
ABANDONED_SECONDS = 1.0  # for the last frames, which the launcher may not read any more
STRAY_GRACE_SECONDS = 1.0  # what ranks left running, between SIGTERM and SIGKILL
SHIM_GRACE_SECONDS = 1.0  # a shim that is alive reports within milliseconds


class HostShutdown:
    """The steps to the end: `stop` or `abandon` begins them, `advance` takes them until done."""

    def __init__(
        self, launcher: Launcher, torchrun: Torchrun, ranks: LocalRanks, grace_seconds: float
    ) -> None:
        """Give ranks `grace_seconds` to save unless the launcher orders otherwise."""
        self.launcher = launcher
        self.torchrun = torchrun
        self.ranks = ranks
        self.grace_seconds = grace_seconds
        self.kill_at: float | None = None  # set by the first reason to stop
        self.strays_asked_at: float | None = None
        self.killing_since: float | None = None
        self.done = False
        self.survivors: list[str] = []

    @property
    def begun(self) -> bool:
        """Return True once there was a reason to stop."""
        return self.kill_at is not None

    @property
    def wait_seconds(self) -> float:
        """Return how long the agent may sleep: /proc must be polled for the end."""
        if self.kill_at is None:
            return 0.5
        return 0.02 if self.killing_since is not None else 0.05

    def abandon(self, reason: str) -> None:
        """Stop without an order; send the launcher the reason, in case it still reads."""
        if self.kill_at is None:
            self.launcher.send_event(event="stopping", reason=reason)
            self.launcher.stall_seconds = ABANDONED_SECONDS
            self.stop(int(signal.SIGTERM), min(self.grace_seconds, ORPHAN_GRACE_SECONDS))

    def stop(self, signum: int, grace_seconds: float) -> None:
        """Signal the ranks, and set the time to kill them; a second call may only hasten it."""
        kill_at = time.monotonic() + grace_seconds
        first = self.kill_at is None
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)
        if grace_seconds > 0 and (first or signum != signal.SIGTERM):
            self.ranks.ask_to_end(signum)

    def advance(self, now: float) -> None:
        """Wait for the ranks, then send SIGTERM and SIGKILL to all they started; end torchrun last.

        The shims see how their ranks end, and have a moment to report it, before they go as well.
        """
        if self.kill_at is None or (now < self.kill_at and self.ranks.unfinished):
            return
        expected = {self.torchrun.pid, *(shim for rank in self.ranks for shim in rank.shims)}
        left = descendants(os.getpid())
        strays = [process for process in left if process.pid not in expected]
        if self.killing_since is None:
            if self._strays_have_time(strays, now, self.kill_at):
                return
            self.killing_since = now
            self.ranks.killing = True
        if not strays and not self._shims_have_time(now, self.killing_since):
            strays = left
        for process in strays:
            kill(process)
        self.torchrun.reap(asked_to_end=True)
        if not left or now - self.killing_since > KILL_SECONDS:
            self.survivors = [f"{process.pid} ({process.name})" for process in left]
            self.done = True

    def _strays_have_time(self, strays: list[Process], now: float, kill_at: float) -> bool:
        """Return True while something may still end on SIGTERM."""
        if not strays:
            return False
        if self.strays_asked_at is None:
            self.strays_asked_at = now
            for process in strays:
                send_signal(process.pid, signal.SIGTERM)
        return now < min(kill_at, self.strays_asked_at + STRAY_GRACE_SECONDS)

    def _shims_have_time(self, now: float, since: float) -> bool:
        """Return True while a shim may still report how its rank ended."""
        return self.ranks.unfinished and now - since < SHIM_GRACE_SECONDS
