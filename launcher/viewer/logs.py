"""`logs RUN`: print the output of the ranks of a run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.errors import UsageError
from rackrun.launcher.output.console import PlainOutput
from rackrun.launcher.run.events import Event, Output
from rackrun.launcher.run.job import Job
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.settings import ReachOptions
from rackrun.launcher.run.state import RunState
from rackrun.launcher.viewer.entries import AttemptRecord, Wrote
from rackrun.launcher.viewer.reach import plan_in
from rackrun.launcher.viewer.replay import Replay
from rackrun.run_folder import RunFolder
from rackrun.runs import Run, is_supervised, name_of
from rackrun.signals import interruptible

LOOK_SECONDS = 0.2
PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class LogsOptions(ReachOptions):
    """Print the output of a run's ranks."""

    examples: ClassVar[Examples] = (
        ("{prog} 3fa8", "of all ranks"),
        ("{prog} 3fa8 --rank 0 --follow", "of one rank, until the run ends"),
    )

    run: Positional[str] = ""
    """The run: ID, start of an ID, name, folder, or latest."""
    host: tuple[str, ...] = ()
    """Print only the ranks of this host."""
    rank: tuple[int, ...] = ()
    """Print only this rank."""
    follow: bool = False
    """Wait for more output until the run ends."""


def logs(run: Run, options: LogsOptions) -> int:
    """Print the output of the ranks; return the exit code."""

    def screens(job: Job, plan: Plan, plain: bool) -> LogScreen:
        if unknown := set(options.host) - {host.name for host in plan.hosts}:
            names = ", ".join(host.name for host in plan.hosts)
            raise UsageError(f"--host {min(unknown)}: there are: {names}")
        if strange := set(options.rank) - set(range(plan.world_size)):
            raise UsageError(f"--rank {min(strange)}: there are: 0 to {plan.world_size - 1}")
        return LogScreen(plan, options)

    with ExitStack() as stack:
        stack.enter_context(interruptible())
        try:
            replay = stack.enter_context(Replay(screens, plain=True))
            if run.folder is None:
                raise UsageError(f"{run} has no folder here; its logs are where it was started")
            read_files(RunFolder(run.folder), replay, options.follow)
            if isinstance(replay.screen, LogScreen):
                replay.screen.let_out()
                replay.draw()
        except KeyboardInterrupt as interrupt:
            return int(interrupt.args[0]) if interrupt.args else 128 + signal.SIGINT
        return 128 + signal.SIGPIPE if replay.closed else 0


class LogScreen(PlainOutput):
    """Only what ranks wrote, of the hosts and ranks that the options name, or of all."""

    def __init__(self, plan: Plan, options: LogsOptions) -> None:
        super().__init__(plan)
        self.options = options

    def show(self, event: Event) -> None:
        """Take the output of the hosts and ranks that were asked for."""
        if not isinstance(event, Output) or event.rank is None:
            return
        hosts, ranks = self.options.host, self.options.rank
        is_wanted_host = not hosts or self.plan.hosts[event.node].name in hosts
        if is_wanted_host and (not ranks or event.rank in ranks):
            self.merger.feed(event)

    def note(self, text: str) -> None:
        """Leave out lines of the launcher."""

    def draw(self, run: RunState, now: float) -> None:
        """Print new lines, and no progress."""
        self.progress_at = now
        super().draw(run, now)

    def finish(self, result: Result) -> None:
        """Write what is left."""
        self.let_out()


def read_files(folder: RunFolder, replay: Replay, follow: bool) -> None:
    """Feed the logs of a run folder to a replay, rank by rank; `follow`: until the run ends."""
    plan = plan_in(folder)
    name, now = name_of(folder.path.name), time.time()
    replay.begin(AttemptRecord(name, now, plan, str(folder.path)), age_seconds=0.0)
    read: dict[Path, int] = {}  # bytes of each log
    while not replay.closed:
        # asked before the logs are read: what is written in between is read in the next round
        is_over = folder.result.exists() or not is_supervised(folder.plan)
        for host in plan.hosts:
            for rank in range(host.first_rank, host.first_rank + host.processes):
                for stream in ("out", "err"):
                    path = folder.log(host.name, rank, stream)
                    for data in _pieces(path, read):
                        replay.take(Wrote((host.node, rank, stream, len(data))), data)
                        replay.wait()
        if is_over or not follow:
            return
        time.sleep(LOOK_SECONDS)


def _pieces(path: Path, read: dict[Path, int]) -> Iterator[bytes]:
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(read.get(path, 0))
        while data := file.read(PIECE_BYTES):
            read[path] = file.tell()
            yield data
