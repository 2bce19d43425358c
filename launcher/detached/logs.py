"""`./run-ssh logs RUN-ID`: print the output of the ranks of a detached run."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.detached.attach import interruptible, watch
from launcher.detached.locate import RunOptions, reached
from launcher.detached.replay import LogScreen, Replay
from launcher.output.console import Display
from launcher.run.job import Job
from launcher.run.plan import Plan
from rackrun.errors import UsageError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


@dataclass(frozen=True)
class LogsOptions(RunOptions):
    """Options of `./run-ssh logs`."""

    host: tuple[str, ...] = ()
    """Print only the ranks of this host."""
    rank: tuple[int, ...] = ()
    """Print only this rank."""
    follow: bool = False
    """Wait for more output until the run ends."""


def logs(options: LogsOptions) -> int:
    """Print the output of the ranks; return the exit code."""

    def screens(job: Job, plan: Plan, plain: bool) -> AbstractContextManager[Display]:
        if unknown := set(options.host) - {host.name for host in plan.hosts}:
            names = ", ".join(host.name for host in plan.hosts)
            raise UsageError(f"--host {min(unknown)}: there are: {names}")
        if strange := set(options.rank) - set(range(plan.world_size)):
            raise UsageError(f"--rank {min(strange)}: there are: 0 to {plan.world_size - 1}")
        screen = LogScreen(plan)
        screen.hosts, screen.ranks = options.host, options.rank
        return screen

    with reached(options) as there, interruptible():
        try:
            with Replay(screens, True, lambda attempt: Path(attempt.folder)) as replay:
                watch(there, replay, on=options.follow)
                if isinstance(replay.screen, LogScreen):
                    replay.screen.let_out()
                    replay.draw()
        except KeyboardInterrupt as interrupt:
            return int(interrupt.args[0]) if interrupt.args else 128 + signal.SIGINT
        return 128 + signal.SIGPIPE if replay.gone else 0
