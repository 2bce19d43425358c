"""What RUN means to every command: an id or the start of one, a name, a folder, or `latest`.

runs/20260102-030405-night/        a run whose folder is here; its id is in plan.json
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rackrun.commands import called
from rackrun.contract.files import LATEST
from rackrun.errors import SaveError, UsageError
from rackrun.run_files import plan_in
from rackrun.run_folder import RUN_NAME, RUNS, RunFolder

SHORT_ID = 8
"""Digits of a run's id in messages; those of its attempts on hosts begin with them."""

_FOLDER = re.compile(RUN_NAME)
NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")


@dataclass(frozen=True)
class Run:
    """A run that a command is about."""

    id: str
    """Empty where its folder has no plan."""
    name: str
    at: float
    """When it was started."""
    folder: RunFolder

    @property
    def is_over(self) -> bool:
        """Return True if its folder shows that it has ended."""
        return is_over(self.folder)

    def __str__(self) -> str:
        name = f" ({self.name})" if self.id else self.name
        return f"run {self.id[:SHORT_ID]}{name}, {self.folder.path}"

    def is_called(self, start: str) -> bool:
        """Return True for the start of its id, with which those of its attempts begin."""
        return bool(self.id) and (self.id.startswith(start) or start.startswith(self.id))


def find_run(text: str | os.PathLike[str], runs: Path = RUNS) -> Run | None:
    """Return the run that is meant, None if there is none here.

    Raises UsageError where several are meant. Of several runs of one name, the one that is not over
    is meant.
    """
    text, path = os.fspath(text), Path(text)
    if os.sep in text or RunFolder(path).plan.is_file():
        return _in_folder(path) if path.is_dir() else None
    if path.is_file() or not NAME.fullmatch(text):
        return None
    here = [_in_folder(folder) for folder in folders_in(runs)]
    if text == LATEST:
        linked = (runs / LATEST).resolve().name  # of several runs of one second
        return max(here, key=lambda run: (run.at, run.folder.path.name == linked), default=None)
    matching = [run for run in here if run.is_called(text)]
    if not matching:
        matching = [run for run in here if run.folder.path.name == text]
    if not matching:
        named = [run for run in here if run.name == text]
        matching = [run for run in named if not run.is_over] or named
    if len(matching) > 1:
        labels = ", ".join(str(run.folder.path) for run in matching)
        hint = "type the folder of one, or more of its id"
        raise UsageError(f"several runs are called {text}: {labels}; {hint}")
    return matching[0] if matching else None


def runs_going_on(runs: Path = RUNS) -> list[Run]:
    """Return the runs in a folder that have not ended, the newest first."""
    here = (_in_folder(folder) for folder in folders_in(runs))
    return [run for run in here if run.id and not run.is_over]


def run_folder(text: str | os.PathLike[str], runs: Path = RUNS) -> Path:
    """Return the folder of the run that is meant; any text that means no run as a path."""
    run = find_run(text, runs)
    return run.folder.path if run else Path(text)


def final_weights(given: str | os.PathLike[str]) -> Path:
    """Return final.pt of a run, and any other path as it is.

    Raises UsageError if there is none, SaveError for a run that has not written it.
    """
    path = run_folder(given)
    if not path.exists():
        runs = {folder.name: str(folder) for folder in path.parent.glob("*")}
        near = [runs[name] for name in get_close_matches(path.name, runs, n=1)]
        meant = near[0] if near else f"another; {called('ps')} lists the runs"
        raise UsageError(f"{path}: no such run or file; type {meant}")
    if not path.is_dir():
        return path
    files = RunFolder(path)
    if not files.final.exists():
        saved = sorted(files.checkpoints.glob("*.pt"))
        what = f"; type {saved[-1]}" if saved else ", and no checkpoints; type another run"
        raise SaveError(f"{path}: no {files.final.name}, which a run writes when it ends{what}")
    return files.final


def how_to_continue(folder: RunFolder) -> str:
    """Return the command that continues the run of a task from its newest checkpoint."""
    path = folder.path
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{called('rerun')} {shlex.quote(str(path))} --resume {shlex.quote(str(path))}"


def unknown_run(text: str) -> UsageError:
    """Return the error for a run that is none of this folder's."""
    elsewhere = "for a run in another folder, type its folder; on another machine, add --on HOST"
    return UsageError(f"no run {text} in {RUNS}/, which {called('ps')} lists; {elsewhere}")


def folders_in(runs: Path) -> list[Path]:
    """Return the run folders in a folder, the newest first."""
    with suppress(OSError):
        names = [entry.name for entry in os.scandir(runs) if _FOLDER.fullmatch(entry.name)]
        return [runs / name for name in sorted(names, reverse=True)]
    return []


def name_of(folder: str) -> str:
    """Return the name of a run, which its folder has after the time."""
    match = _FOLDER.fullmatch(folder)
    return match["name"] if match else folder


def start_of(folder: Path) -> float:
    """Return when a run began: the time in the name of its folder."""
    if match := _FOLDER.fullmatch(folder.name):
        with suppress(ValueError, OverflowError):
            return time.mktime(time.strptime(match["start"], "%Y%m%d-%H%M%S"))
    return folder.stat().st_mtime


def is_over(folder: RunFolder) -> bool:
    """Return True for a run that has its result, or that nothing supervises."""
    return folder.result.exists() or not is_supervised(folder)


def is_supervised(folder: RunFolder) -> bool:
    """Return True while what supervises a run lives, or where that is unknown."""
    try:
        with folder.events.open() as file:  # it has locked this; the kernel unlocks it at its end
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _in_folder(folder: Path) -> Run:
    """Return the run of a folder; of a link such as `runs/latest`, of what it leads to now."""
    if folder.is_symlink():
        folder = folder.parent / folder.readlink()
    files = RunFolder(folder)
    plan = plan_in(files)
    run_id = plan.run_id if plan and plan.has_id else ""
    return Run(run_id, name_of(folder.name), start_of(folder), files)
