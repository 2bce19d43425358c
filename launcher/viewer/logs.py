"""`logs RUN`: print the output of the ranks of a run."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from rackrun.commandline.options import Examples, Positional, Values
from rackrun.errors import UsageError
from rackrun.launcher.output.merge import readable
from rackrun.launcher.run.settings import OnOptions
from rackrun.launcher.viewer.reach import plan_of
from rackrun.run_files import RunPlan, with_all_nodes
from rackrun.run_folder import RunFolder, file_name
from rackrun.runs import Run, is_over
from rackrun.signals import interruptible
from rackrun.terminal import discard

LOOK_SECONDS = 0.2
LINE_BYTES = 1 << 16
_LOG = re.compile(r"rank-([0-9]{1,9})\.(out|err)")


@dataclass(frozen=True)
class LogsOptions(OnOptions):
    """Print the output of a run's ranks."""

    examples: ClassVar[Examples] = (
        ("{prog} 3fa8", "of all ranks"),
        ("{prog} 3fa8 --rank 0 --follow", "of one rank, until the run ends"),
    )

    run: Positional[str] = ""
    """The run: ID, start of an ID, name, folder, or latest (default: the only running one)."""
    host: Annotated[tuple[str, ...], Values("HOST")] = ()
    """Print only the ranks of this host; repeatable."""
    rank: tuple[int, ...] = ()
    """Print only this rank; repeatable."""
    follow: bool = False
    """Wait for more output until the run ends."""


def logs(run: Run, options: LogsOptions) -> int:
    """Print the output of the ranks; return the exit code."""
    plan = with_all_nodes(plan_of(run.folder), run.folder)
    _refuse_unknown(plan, options)
    with interruptible():
        try:
            _print(run.folder, plan, options)
        except KeyboardInterrupt as interrupt:
            return int(interrupt.args[0]) if interrupt.args else 128 + signal.SIGINT
        except BrokenPipeError:
            discard(sys.stdout)
            return 128 + signal.SIGPIPE
    return 0


def _refuse_unknown(plan: RunPlan, options: LogsOptions) -> None:
    if unknown := set(options.host) - {host.name for host in plan.hosts}:
        names = ", ".join(host.name for host in plan.hosts)
        raise UsageError(f"--host {min(unknown)}: no such host; there are: {names}")
    if strange := set(options.rank) - set(range(plan.world_size)):
        raise UsageError(f"--rank {min(strange)}: the last rank is {plan.world_size - 1}")


def _print(folder: RunFolder, plan: RunPlan, options: LogsOptions) -> None:
    """Print the logs, attempt by attempt and rank by rank; `--follow`: until the run ends."""
    has_hosts, has_ranks = len(plan.hosts) > 1, plan.world_size > 1
    read: dict[Path, int] = {}  # bytes of each log
    while True:
        # asked before the logs are read: what is written in between is read in the next round
        everything = is_over(folder)
        for log in _logs(folder, options):
            where = f"{log.host}:" if has_hosts else ""
            prefix = f"{where}{log.rank} | " if has_ranks or has_hosts else ""
            for line in _new_lines(log.path, read, everything):
                sys.stdout.write(f"{prefix}{readable(line)}\n")
        sys.stdout.flush()
        if everything or not options.follow:
            return
        time.sleep(LOOK_SECONDS)


@dataclass(frozen=True, order=True)
class _Log:
    attempt: int
    rank: int
    is_stderr: bool
    host: str
    path: Path


def _logs(folder: RunFolder, options: LogsOptions) -> list[_Log]:
    hosts = {file_name(host) for host in options.host}
    logs = []
    for path in folder.logs.glob("*/*/rank-*"):
        attempt, host = path.parent.name, path.parents[1].name
        match = _LOG.fullmatch(path.name)
        if not match or not attempt.isdecimal() or (hosts and host not in hosts):
            continue
        rank = int(match[1])
        if not options.rank or rank in options.rank:
            logs.append(_Log(int(attempt), rank, match[2] == "err", file_name(host), path))
    return sorted(logs)


def _new_lines(path: Path, read: dict[Path, int], everything: bool) -> Iterator[bytes]:
    """Yield the lines that are whole; of a run that is over, also what is left."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(read.get(path, 0))
        while line := file.readline(LINE_BYTES):
            if not (line.endswith(b"\n") or len(line) == LINE_BYTES or everything):
                return
            read[path] = file.tell()
            yield line.rstrip(b"\n")
