"""The end of a run on this host: by its agent, or by another one when the agent was killed.

Ranks are asked, then everything they started is killed. Where an agent could not do that, a second
one is ordered to `sweep`: to find, end and remove what is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

from rackrun.launcher.remote.agent.frames import Launcher
from rackrun.launcher.remote.agent.ranks import LocalRanks
from rackrun.launcher.remote.agent.torchrun_process import Torchrun
from rackrun.launcher.remote.files import is_own_folder, is_scratch, remove_folder
from rackrun.launcher.remote.processes import (
    KILL_SECONDS,
    Process,
    descendants,
    kill,
    run_program,
    send_signal,
)
from rackrun.launcher.remote.run_processes import processes_below

ORPHAN_GRACE_SECONDS = 3.0  # the launcher is gone: ranks may save, but not for long
ABANDONED_SECONDS = 1.0  # for the last frames, which the launcher may not read any more
STRAY_GRACE_SECONDS = 1.0  # what ranks left running, between SIGTERM and SIGKILL
SHIM_GRACE_SECONDS = 1.0  # a shim that is alive reports within milliseconds
TOGETHER_SECONDS = 0.3  # for shims to report that a scheduler has signalled the ranks as well


class HostShutdown:
    """The steps to the end: `stop` or `abandon` begins them, `advance` takes them until done."""

    def __init__(self, launcher: Launcher, torchrun: Torchrun, ranks: LocalRanks) -> None:
        self.launcher = launcher
        self.torchrun = torchrun
        self.ranks = ranks
        self.kill_at: float | None = None  # set by the first reason to stop
        self.ask_at: float | None = None
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
            self.stop(int(signal.SIGTERM), ORPHAN_GRACE_SECONDS)

    def stop(self, signum: int, grace_seconds: float) -> None:
        """Signal the ranks, and set the time to kill them; a second call may only hasten it."""
        kill_at = time.monotonic() + grace_seconds
        first = self.kill_at is None
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)
        if grace_seconds > 0 and signum != signal.SIGTERM:
            self.ranks.ask_to_end(signum)
        elif grace_seconds > 0 and first:
            self.ask_at = time.monotonic() + TOGETHER_SECONDS * self.ranks.signalled_together
            self.advance(time.monotonic())

    def advance(self, now: float) -> None:
        """Wait for the ranks, then send SIGTERM and SIGKILL to all they started; end torchrun last.

        The shims see how their ranks end, and have a moment to report it, before they go as well.
        """
        if self.ask_at is not None and now >= self.ask_at:
            self.ask_at = None
            self.ranks.ask_to_end(int(signal.SIGTERM))
        if self.kill_at is None or (now < self.kill_at and self.ranks.unfinished):
            return
        expected = {self.torchrun.pid, *(rank.shim for rank in self.ranks)}
        left = descendants(os.getpid())  # as a subreaper, the agent inherits all that ranks left
        strays = [process for process in left if process.pid not in expected]
        if self.killing_since is None:
            if self._strays_have_time(strays, now, self.kill_at):
                return
            self.killing_since = now
            self.ranks.killing = True
        shims_have_time = now - self.killing_since < SHIM_GRACE_SECONDS
        if not strays and not (self.ranks.unfinished and shims_have_time):
            strays = left  # the shims as well: all have reported, or will not
        for process in strays:
            kill(process)
        self.torchrun.reap(asked_to_end=True)
        if not left or now - self.killing_since > KILL_SECONDS:
            self.survivors = [f"{process.pid} ({process.name})" for process in left]
            self.done = True

    def _strays_have_time(self, strays: list[Process], now: float, kill_at: float) -> bool:
        if not strays:
            return False
        if self.strays_asked_at is None:  # once: those that catch SIGTERM get no second one
            self.strays_asked_at = now
            for process in strays:
                send_signal(process.pid, signal.SIGTERM)
        return now < min(kill_at, self.strays_asked_at + STRAY_GRACE_SECONDS)


def sweep(scratch: str) -> list[str]:
    """End what is left of a run; return the names of what could not be ended.

    What runs in a container ends with it. The path may come from a process of another account, so
    any other path than that of an agent's folder is left alone.
    """
    if not is_scratch(scratch):
        return []
    in_container = is_own_folder(scratch) and os.path.exists(f"{scratch}/container")
    kept = _remove_container(os.path.basename(scratch)) if in_container else []
    deadline = time.monotonic() + KILL_SECONDS
    left = processes_below(scratch)
    while left and time.monotonic() < deadline:
        for process in left:
            kill(process)
        time.sleep(0.02)
        left = processes_below(scratch)
    remove_folder(scratch)
    return [*kept, *(f"{process.pid} ({process.name})" for process in left)]


def _remove_container(name: str) -> list[str]:
    try:
        done = run_program(["docker", "rm", "--force", name], KILL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return [f"container {name}"]
    is_removed = done.returncode == 0 or b"No such container" in done.stderr
    return [] if is_removed else [f"container {name}"]
