"""One run of the list, and the list for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rackrun import tables
from rackrun.launcher.run.host_names import grouped
from rackrun.runs import SHORT_ID
from rackrun.terminal import one_line
from rackrun.units import age, plural

HEAD = ("id", "name", "task", "hosts", "state", "step", "age", "folder")
WRAPPED = ("name", "hosts", "folder")
NUMBERS = ("step", "age")
TASK_WORDS = (
    "-m",
    "rackrun.training",
)  # what a rank of a task is started with, before the task's name


@dataclass(frozen=True)
class ListedRun:
    """A run as the list shows it."""

    run: str
    """The id of its newest attempt; all of its attempts have ids that begin alike."""
    name: str
    task: str
    hosts: tuple[str, ...]
    state: str
    """running, done, failed, interrupted or killed."""
    exit_code: int | None
    step: int | None
    age_seconds: float
    """Seconds since its start."""
    folder: str


def task_of(command: Sequence[str]) -> str:
    """Return the task that a rank's command line runs, or the name of the user's program."""
    for index in range(len(command) - len(TASK_WORDS)):
        if tuple(command[index : index + len(TASK_WORDS)]) == TASK_WORDS:
            return command[index + len(TASK_WORDS)]
    scripts = [arg for arg in command if arg.endswith((".py", ".sh"))]
    return (scripts or [*command, ""])[0].rpartition("/")[2]


def table(runs: Sequence[ListedRun]) -> str:
    """Return the list for people: a line for each run, and at the end how many are in which state.

    The folder is never cut: on a narrow terminal it goes on in the next line.
    """
    drawn = tables.table(HEAD, [_row(run) for run in runs], WRAPPED, NUMBERS)
    states = Counter(run.state for run in runs)
    counted = ", ".join(f"{count} {one_line(state)}" for state, count in states.items())
    return f"{drawn}\n{plural(len(runs), 'run')}: {counted}\n"


def _row(run: ListedRun) -> tuple[str, ...]:
    state = run.state if run.exit_code in (None, 0) else f"{run.state} ({run.exit_code})"
    step = "-" if run.step is None else f"{run.step:,}"
    cells = (run.run[:SHORT_ID], run.name, run.task, grouped(run.hosts), state, step)
    return tuple(one_line(cell) for cell in (*cells, age(run.age_seconds), run.folder))
