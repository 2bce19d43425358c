"""What a task needs before a host is contacted or a folder made: right options, and its data."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from rackrun.commands import called
from rackrun.contract import variables
from rackrun.contract.files import LATEST, PUBLISHED
from rackrun.contract.task_needs import TaskNeeds
from rackrun.data_location import is_folder, parts_of
from rackrun.errors import DataError, UsageError, UserCodeError
from rackrun.launcher.run.job import (
    PYTHONS,
    Command,
    TaskWork,
    Work,
    data_of,
    option_of,
)
from rackrun.run_folder import RunFolder
from rackrun.runs import name_of, run_folder
from rackrun.shapes import Misshapen, parsed
from rackrun.shard_folder import why_no_shards
from rackrun.user_code.tasks import why_no_task

MOST_BYTES = 1 << 20  # of what a task needs


@contextmanager
def check_task_options(
    work: Work, name: str, *args: str, folder: RunFolder | None = None
) -> Iterator[Callable[[], TaskNeeds]]:
    """Have a task check its options, in a process of its own; yield what waits for its answer.

    The hosts are reached meanwhile. What is yielded returns what the task needs of them, or raises
    the task's complaint. The command `name` and `args` precede the task in its messages. `folder`
    is that of the run if ranks will be on this machine, where checkpoints can be looked at.
    """
    if not isinstance(work, TaskWork):
        yield TaskNeeds
        return
    _refuse_hidden_package()
    of_run = {}
    if folder:
        run = name_of(folder.path.name)
        of_run = {variables.RUN_FOLDER: str(folder.path), variables.RUN_NAME: run}
    command = [sys.executable, "-m", "rackrun.training", work.task, "check", *work.options]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **of_run, variables.TYPED: " ".join((called(name), *args))},
    ) as process:
        yield lambda: _refuse(process)


def _refuse_hidden_package() -> None:
    """Raise UsageError for a module of the current folder that ranks would import in place of ours.

    `python -m` looks into the current folder first. A checkout of rackrun is meant to come first.
    """
    if Path("rackrun/contract/tasks.py").exists():
        return
    for path in (Path("rackrun.py"), Path("rackrun/__init__.py")):
        if path.exists():
            raise UsageError(
                f"{path}: ranks would import it in place of rackrun; rename it, or type the command"
                " in another folder"
            )


def _refuse(process: subprocess.Popen[str]) -> TaskNeeds:
    needs, complaint = process.communicate()
    for kind in (UsageError, DataError):
        if process.returncode == kind.exit_code:
            raise kind(complaint.strip().removeprefix("error: "))
    # A model that no rank can train; any other exception may be due to this machine alone.
    last = complaint.strip().rpartition("\n")[2].removeprefix("error: ")
    if process.returncode == UserCodeError.exit_code and last.startswith("--model "):
        raise UserCodeError(last)
    try:
        return parsed("".join(needs.splitlines()[-1:]), TaskNeeds, MOST_BYTES)
    except Misshapen:  # a task of the user's that this machine cannot import: its ranks say why
        return TaskNeeds()


def refuse_absent_data(work: Work, runs: Path) -> None:
    """Raise UsageError for shards, a run to resume or weights that are to be here, and are not."""
    for data in parts_of(data_of(work)):
        if is_folder(data) and (reason := why_no_shards(data)):
            raise UsageError(reason)
    resume = option_of(work, "--resume")
    if resume not in ("", LATEST) and not run_folder(resume, runs).exists():
        raise UsageError(
            f"--resume {resume}: no such file or run; type its path, its name, or latest"
        )
    weights = option_of(work, "--weights")
    is_file = weights and weights != PUBLISHED and "://" not in weights
    if is_file and not Path(weights).is_file():
        raise UsageError(f"--weights {weights}: no such file{_file_meant(Path(weights))}")


def _file_meant(path: Path) -> str:
    if RunFolder(path).final.is_file():
        return f"; did you mean {path / 'final.pt'}?"
    names = [other.name for other in path.parent.glob("*") if other.is_file()]
    close = get_close_matches(path.name, [*names, PUBLISHED], n=1)
    meant = close and (PUBLISHED if close[0] == PUBLISHED else path.parent / close[0])
    return f"; did you mean {meant}?" if meant else ""


def refuse_absent_program(work: Work, python: str) -> None:
    """Raise UsageError for a command whose program, or Python file, is not on this machine.

    It may lie beside the interpreter of the ranks.
    """
    if not isinstance(work, Command):
        return
    program, file, *_ = *work.args, ""
    if program in PYTHONS:
        if file.endswith(".py") and not Path(file).is_file():
            raise UsageError(why_no_task(file))
        return
    beside = Path(shutil.which(python) or python).parent
    if shutil.which(program) or shutil.which(program, path=beside):
        return
    if Path(program).is_file():
        raise UsageError(f"{program}: not a program that can be run; type: chmod +x {program}")
    close = get_close_matches(program, [*PYTHONS, "bash"], n=1)
    meant = f"did you mean {close[0]}?" if close else "install it, or type its path"
    raise UsageError(f"{program}: no such program; {meant}")
