"""The runs of a folder of run folders, read from the files that every run leaves there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rackrun.launcher.catalog.listed import ListedRun, task_of
from rackrun.launcher.run.job import RUN_ID
from rackrun.run_folder import RunFolder
from rackrun.runs import MOST_BYTES, folders_in, is_supervised, name_of, start_of
from rackrun.shapes import Between, Matches, Misshapen, parsed_file, parsed_json, shaped

METRICS_BYTES = 1 << 16  # of the end of metrics.jsonl

Step = Annotated[int, Between(0, 1 << 53)]


@dataclass(frozen=True)
class PlannedRun:
    """The part of plan.json that the list shows."""

    run_id: Annotated[str, Matches(RUN_ID)]
    hosts: tuple[str, ...]
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """The part of result.json that the list shows."""

    verdict: Literal["running", "killed", "done", "failed", "interrupted"]
    exit_code: Annotated[int, Between(-128, 255)] | None = None
    step: Step | None = None


def runs_in(runs: Path) -> Iterator[ListedRun]:
    """Yield the runs whose folders are in `runs`, the newest first; what is damaged is left out."""
    for folder in folders_in(runs):
        with suppress(OSError, Misshapen):
            yield _run_in(folder)


def _run_in(path: Path) -> ListedRun:
    folder = RunFolder(path)
    plan, outcome = _plan(folder.plan), _outcome(folder)
    return ListedRun(
        run=plan.run_id,
        name=name_of(path.name),
        task=task_of(plan.command),
        hosts=plan.hosts,
        state=outcome.verdict,
        exit_code=outcome.exit_code,
        step=_last_step(folder) if outcome.step is None else outcome.step,
        age_seconds=round(max(0.0, time.time() - start_of(path)), 1),
        folder=os.fspath(path),
    )


def _plan(path: Path) -> PlannedRun:
    document = _object(path)
    hosts = document.get("hosts")
    first = hosts[0] if isinstance(hosts, list) and hosts else None
    if not isinstance(first, dict) or not all(isinstance(host, dict) for host in hosts or ()):
        raise Misshapen("a plan without hosts")
    values = {
        "run_id": document.get("run_id"),
        "hosts": [host.get("name") for host in hosts or ()],
        "command": first.get("command"),
    }
    plan: PlannedRun = shaped(values, PlannedRun, path.name)
    return plan


def _outcome(folder: RunFolder) -> Outcome:
    try:
        document = _object(folder.result)
    except OSError:  # no result: of a run that goes on, or whose launcher was killed
        return Outcome("running" if is_supervised(folder) else "killed")
    report = document.get("report")
    step = report.get("step") if isinstance(report, dict) else None
    values = {name: document.get(name) for name in ("verdict", "exit_code")}
    outcome: Outcome = shaped({**values, "step": step}, Outcome, folder.result.name)
    return outcome


def _object(path: Path) -> dict[str, Any]:
    return parsed_file(path, dict[str, Any], MOST_BYTES)


def _last_step(folder: RunFolder) -> int | None:
    with suppress(OSError, Misshapen):
        return _step_of(_object(folder.live))  # the launcher's, which removes it at the end
    with suppress(OSError, Misshapen), folder.metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - METRICS_BYTES))
        lines = file.read().rpartition(b"\n")[0].splitlines()  # the last one may be cut short
        return _step_of(parsed_json(lines[-1], METRICS_BYTES)) if lines else None
    return None


def _step_of(document: object) -> int | None:
    step = document.get("step") if isinstance(document, dict) else None
    number: int | None = shaped(step, Step | None, "step")
    return number
