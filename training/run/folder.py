"""The folder of this run, which the launcher has made, and those of earlier runs of its name."""

import glob
import json
import os
import re
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rackrun.atomic import PARTIAL, translated_os_errors
from rackrun.contract import variables
from rackrun.errors import UsageError
from rackrun.run_folder import RUNS, RunFolder, new_run_folder

if TYPE_CHECKING:  # the check of a task reads names here, without torch
    from rackrun.training.ranks import Ranks


def own_folder(task: str, given: str, ranks: "Ranks") -> RunFolder:
    """Return the folder of this run: the given one, the launcher's, or a new one under runs/.

    A new one is made by the first rank, so that no other run has it.
    """
    if path := given or os.environ.get(variables.RUN_FOLDER):
        return RunFolder(Path(path))
    return RunFolder(RUNS / ranks.on_first(lambda: new_run_folder(RUNS, task).path.name))


def writes_to(folder: RunFolder, ranks: "Ranks") -> bool:
    """Make the folder on all nodes; return True on the one rank that writes to each disk.

    Any node may survive the others, so one rank of each node writes, unless nodes share the folder.
    They detect that by marker files: a rank that finds the marker of a lower rank does not write.
    """
    if ranks.writes:
        folder.make()
    if ranks.share_a_host:
        return ranks.writes
    token = ranks.on_first(partial(secrets.token_hex, 4))
    mark = folder.checkpoints / f".{token}-{ranks.rank:08d}{PARTIAL}"
    if ranks.writes:
        with translated_os_errors(mark):
            mark.touch()
    ranks.all_reduce_max(0)  # all have left their marks
    lowest = min(folder.checkpoints.glob(f".{token}-*{PARTIAL}"), default=None)
    ranks.all_reduce_max(0)  # all have looked
    if ranks.writes:
        mark.unlink(missing_ok=True)
    return ranks.writes and lowest == mark


def runs_folder() -> Path:
    """Return the folder of run folders: the launcher's, or runs/."""
    launched = os.environ.get(variables.RUN_FOLDER)
    return Path(launched).parent if launched else RUNS


def run_name(task: str) -> str:
    """Return the name of this run: the launcher's --name, or the task."""
    return os.environ.get(variables.RUN_NAME) or task


def newest_run(task: str) -> Path:
    """Return what `--resume latest` means: the newest run with checkpoints of this task and name.

    UsageError if there is none.
    """
    runs, name = runs_folder(), run_name(task)
    saved = {path.parents[1] for path in runs.glob(f"*-{glob.escape(name)}*/checkpoints/step-*.pt")}
    newest = max((run for run in saved if _is_of(run, name, task)), default=None)
    if newest is None:
        raise UsageError(f"--resume latest: no run {name} of {task} in {runs} has a checkpoint")
    return newest


def _is_of(run: Path, name: str, task: str) -> bool:
    # The launcher appends a number where a folder exists.
    if not re.fullmatch(rf"\d{{8}}-\d{{6}}-{re.escape(name)}(-\d+)?", run.name):
        return False
    try:
        content = json.loads(RunFolder(run).config.read_bytes())
    except (OSError, ValueError):  # only the first node has a config.json
        return True
    recorded = content if isinstance(content, dict) else {}
    return bool((recorded.get("name", name), recorded.get("task", task)) == (name, task))
