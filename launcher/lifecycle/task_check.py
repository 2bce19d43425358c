"""Let a task check its own options, before any host is contacted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from launcher.run.job import TaskWork, Work
from rackrun.errors import UsageError


@contextmanager
def check_task_options(work: Work) -> Iterator[Callable[[], None]]:
    """Ask a task in a process of its own; what is yielded waits, and raises what it complained of.

    A quarter of a second, in which the hosts can be reached.
    """
    if not isinstance(work, TaskWork) or not work.options:
        yield lambda: None
        return
    command = [sys.executable, "-m", "training", work.name, "check", *work.options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        yield lambda: _refuse(process)


def _refuse(process: subprocess.Popen[str]) -> None:
    _, complaint = process.communicate()
    if process.returncode == UsageError.exit_code:
        raise UsageError(complaint.strip().removeprefix("error: "))
