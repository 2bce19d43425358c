"""`ps`: list the runs whose folders are here."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from rackrun import tables
from rackrun.commandline.options import Examples, Values
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.launcher.catalog.listed_runs import ListedRun, runs_in
from rackrun.launcher.output.console import short_path
from rackrun.launcher.run.host_names import grouped
from rackrun.launcher.run.settings import OnOptions
from rackrun.run_folder import RUNS
from rackrun.runs import SHORT_ID
from rackrun.terminal import one_line
from rackrun.units import age, plural

HEAD = ("id", "name", "task", "hosts", "state", "step", "age", "folder")
WRAPPED = ("name", "hosts", "folder")
NUMBERS = ("step", "age")


@dataclass(frozen=True)
class PsOptions(OnOptions):
    """List the runs of this folder; `rack` shows what hosts run."""

    examples: ClassVar[Examples] = (
        ("{prog}", "the runs of this folder"),
        ("{prog} --json", "as JSON"),
    )

    runs: Annotated[Path, Values("FOLDER")] = RUNS
    """Folder that contains run folders."""
    json: bool = False
    """Print the result as JSON."""


def main(args: Sequence[str]) -> int:
    """List the runs; return the exit code."""
    return ps(parse(PsOptions, called("ps"), args))


def ps(options: PsOptions) -> int:
    """Print the list, the newest run first."""
    runs = [replace(run, folder=short_path(Path(run.folder))) for run in runs_in(options.runs)]
    if options.json:
        sys.stdout.write(f"{json.dumps([asdict(run) for run in runs], indent=2)}\n")
    else:
        sys.stdout.write(table(runs) if runs else f"no run in {options.runs}/\n")
    return 0


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
