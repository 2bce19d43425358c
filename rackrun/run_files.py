"""What a run folder says of its run: the plan, and how it ended; hosts may have written there."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import structs

from rackrun.run_folder import RunFolder
from rackrun.shapes import Excerpt, Misshapen, Real, Whole, at_most, between, parsed_file

MOST_BYTES = 1 << 26  # of a file that names every host
ID = re.compile(r"[0-9a-f]{8}|[0-9a-f]{32}")
LARGEST = 1e11
"""The largest of the numbers that are shown; also beyond what clocks show, in seconds."""


class RunHost(Excerpt, frozen=True):
    """A host of plan.json."""

    name: str = ""
    processes: Whole = 0
    command: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    gpu_model: str = ""
    signalled_together: bool = False
    """A scheduler started its launcher."""


class RunPlan(Excerpt, frozen=True):
    """What of plan.json is shown; empty where there is none."""

    run_id: Annotated[str, at_most(64)] = ""
    world_size: Whole = 0
    hosts: tuple[RunHost, ...] = ()

    @property
    def has_id(self) -> bool:
        """Return True if its id is one of ours."""
        return bool(ID.fullmatch(self.run_id))


class RunEnd(Excerpt, frozen=True):
    """What of result.json is shown; empty where there is none yet."""

    verdict: Literal["", "done", "failed", "interrupted"] = ""
    exit_code: Annotated[int, between(-128, 255)] | None = None
    cause: str = ""
    host: str | None = None
    rank: Whole | None = None
    log: Path | None = None
    advice: str = ""
    traceback: Annotated[str, at_most(1 << 20)] = ""
    seconds: Real = 0.0
    resume: str = ""
    """Not empty where the run can be continued."""
    hosts: dict[str, str] = {}
    """The end state of each host."""
    report: dict[str, Any] = {}
    """What ranks have reported last, by name."""

    def number(self, name: str) -> float | None:
        """Return a number that ranks have reported; None if they have not."""
        value = self.report.get(name)
        if isinstance(value, int | float) and abs(value) < LARGEST:
            return float(value)
        return None


def plan_in(folder: RunFolder) -> RunPlan | None:
    """Return the plan of a run; None where there is none."""
    with suppress(OSError, Misshapen):
        return parsed_file(folder.plan, RunPlan, MOST_BYTES)
    return None


def with_all_nodes(plan: RunPlan, folder: RunFolder) -> RunPlan:
    """Return the plan of a run with the hosts of all nodes, each of which has written its own."""
    others = [plan_in(node) for node in folder.of_nodes()[1:]]
    of_run = [other for other in others if other and other.run_id == plan.run_id]
    hosts = (*plan.hosts, *(host for other in of_run for host in other.hosts))
    return structs.replace(plan, hosts=hosts)


def end_in(folder: RunFolder) -> RunEnd | None:
    """Return how a run ended; None where it has not."""
    with suppress(OSError, Misshapen):
        return parsed_file(folder.result, RunEnd, MOST_BYTES)
    return None
