"""`./run-ssh logs RUN`: print the output of the ranks of a run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from launcher.detached.attach import watch
from launcher.detached.entries import AttemptRecord, Wrote
from launcher.detached.launcher_here import plan_in
from launcher.detached.locate import RunOptions, is_controlled, reached
from launcher.detached.replay import LogScreen, Replay
from launcher.output.console import Display
from launcher.run.job import Job
from launcher.run.plan import Plan
from rackrun.commandline.options import Examples
from rackrun.errors import UsageError
from rackrun.light_dataclass import dataclass
from rackrun.run_folder import RunFolder
from rackrun.runs import Run, is_supervised, name_of
from rackrun.signals import interruptible

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


LOOK_SECONDS = 0.2
PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class LogsOptions(RunOptions):
    """Print the output of a run's ranks."""

    examples: ClassVar[Examples] = (
        ("{prog} 3fa8", "of all ranks"),
        ("{prog} 3fa8 --rank 0 --follow", "of one rank, until the run ends"),
    )

    host: tuple[str, ...] = ()
    """Print only the ranks of this host."""
    rank: tuple[int, ...] = ()
    """Print only this rank."""
    follow: bool = False
    """Wait for more output until the run ends."""


def logs(run: Run, options: LogsOptions) -> int:
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

    with ExitStack() as stack:
        stack.enter_context(interruptible())
        try:
            replay = Replay(screens, True, lambda attempt: Path(attempt.folder))
            stack.enter_context(replay)
            if is_controlled(run, options):
                reached_run = stack.enter_context(reached(run, options))
                watch(reached_run, replay, on=options.follow)
            elif run.folder:
                read_files(RunFolder(run.folder), replay, options.follow)
            else:
                raise UsageError(f"{run} has no folder here; its logs are where it was started")
            if isinstance(replay.screen, LogScreen):
                replay.screen.let_out()
                replay.draw()
        except KeyboardInterrupt as interrupt:
            return int(interrupt.args[0]) if interrupt.args else 128 + signal.SIGINT
        return 128 + signal.SIGPIPE if replay.closed else 0


def read_files(folder: RunFolder, replay: Replay, follow: bool) -> None:
    """Feed the logs of a run folder to a replay, rank by rank; `follow`: until the run ends."""
    plan = plan_in(folder)
    name, now = name_of(folder.path.name), time.time()
    attempt = AttemptRecord(name, str(folder.path), (), now, plan)
    replay.begin(attempt, age_seconds=0.0)
    read: dict[Path, int] = {}  # bytes of each log
    while not replay.closed:
        is_over = folder.result.exists() or not is_supervised(folder.plan)
        for host in plan.hosts:
            for rank in range(host.first_rank, host.first_rank + host.processes):
                for stream in ("out", "err"):
                    path = folder.log(host.name, rank, stream)
                    for data in _pieces(path, read):
                        wrote = Wrote((host.node, rank, stream, len(data)))
                        replay.take(wrote, data)
                        replay.wait()
        if is_over or not follow:
            return
        time.sleep(LOOK_SECONDS)


def _pieces(path: Path, read: dict[Path, int]) -> Iterator[bytes]:
    """Yield what a log has beyond what was read of it."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(read.get(path, 0))
        while data := file.read(PIECE_BYTES):
            read[path] = file.tell()
            yield data
