"""The runs of a folder of run folders, read from the files that every run leaves there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from rackrun.launcher.catalog.listed import ListedRun, task_of
from rackrun.launcher.run.job import RUN_ID
from rackrun.launcher.run.result import ending_in
from rackrun.run_folder import RunFolder
from rackrun.runs import MOST_BYTES, folders_in, is_supervised, name_of, start_of
from rackrun.shapes import Excerpt, Misshapen, at_least, between, matches, parsed, parsed_file

METRICS_BYTES = 1 << 16  # of the end of metrics.jsonl


class ListedHost(Excerpt, frozen=True):
    """A host of plan.json."""

    name: str
    command: tuple[str, ...]


class PlannedRun(Excerpt, frozen=True):
    """The part of plan.json that the list shows."""

    run_id: Annotated[str, matches(RUN_ID)]
    hosts: Annotated[tuple[ListedHost, ...], at_least(1)]


class ReachedStep(Excerpt, frozen=True):
    """A line of metrics.jsonl, or state.json."""

    step: Annotated[int, between(0)] | None = None


def runs_in(runs: Path) -> Iterator[ListedRun]:
    """Yield the runs whose folders are in `runs`, the newest first; what is damaged is left out."""
    for folder in folders_in(runs):
        with suppress(OSError, Misshapen):
            yield _run_in(folder)


def _run_in(path: Path) -> ListedRun:
    folder = RunFolder(path)
    plan, ending = parsed_file(folder.plan, PlannedRun, MOST_BYTES), ending_in(folder)
    goes_on = "running" if is_supervised(folder) else "killed"
    step = ending.report.get("step") if ending else None
    return ListedRun(
        run=plan.run_id,
        name=name_of(path.name),
        task=task_of(plan.hosts[0].command),
        hosts=tuple(host.name for host in plan.hosts),
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
