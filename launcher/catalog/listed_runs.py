"""The runs that `ps` lists: those in a folder of run folders, read from the files of each run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rackrun.launcher.run.job import TASK_MODULE
from rackrun.run_files import MOST_BYTES, end_in, plan_in, with_all_nodes
from rackrun.run_folder import RunFolder
from rackrun.runs import folders_in, is_supervised, name_of, start_of
from rackrun.shapes import Excerpt, Misshapen, between, parsed, parsed_file

METRICS_BYTES = 1 << 16  # of the end of metrics.jsonl


class ReachedStep(Excerpt, frozen=True):
    """A line of metrics.jsonl, or state.json."""

    step: Annotated[int, between(0)] | None = None


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


def runs_in(runs: Path) -> Iterator[ListedRun]:
    """Yield the runs whose folders are in `runs`, the newest first; what is damaged is left out."""
    for folder in folders_in(runs):
        if run := _run_in(folder):
            yield run


def _run_in(path: Path) -> ListedRun | None:
    folder = RunFolder(path)
    plan, ending = plan_in(folder), end_in(folder)
    if plan is None or not plan.has_id or not plan.hosts:
        return None
    goes_on = "running" if is_supervised(folder) else "killed"
    step = ending.report.get("step") if ending else None
    return ListedRun(
        run=plan.run_id,
        name=name_of(path.name),
        task=_task_of(plan.hosts[0].command),
        hosts=tuple(host.name for host in with_all_nodes(plan, folder).hosts),
        state=ending.verdict if ending else goes_on,
        exit_code=ending.exit_code if ending else None,
        step=step if isinstance(step, int) else _last_step(folder),
        age_seconds=round(max(0.0, time.time() - start_of(path)), 1),
        folder=os.fspath(path),
    )


def _last_step(folder: RunFolder) -> int | None:
    with suppress(OSError, Misshapen):
        # The launcher's, which removes it at the end.
        return parsed_file(folder.state, ReachedStep, MOST_BYTES).step
    with suppress(OSError, Misshapen), folder.metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - METRICS_BYTES))
        lines = file.read().rpartition(b"\n")[0].splitlines()  # the last one may be cut short
        return parsed(lines[-1], ReachedStep, METRICS_BYTES).step if lines else None
    return None


def _task_of(command: Sequence[str]) -> str:
    # The task that a rank's command line runs, or the name of the user's program.
    words = tuple(command)
    for index in range(len(words) - 2):
        if words[index : index + 2] == TASK_MODULE:
            return words[index + 2]
    scripts = [word for word in words if word.endswith((".py", ".sh"))]
    return (scripts or [*words, ""])[0].rpartition("/")[2]
