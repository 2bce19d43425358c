"""`--scaling 1,2,4,8`: the throughput of a synthetic run on more and more hosts.

The smallest number runs once more at the end: where hosts got slower or faster meanwhile, its range
grows, and with it that of every efficiency.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated

from launcher.run.hosts import MOST_HOSTS
from launcher.run.job import JobTemplate, TaskWork, Work
from launcher.run.result import Result
from rackrun.errors import Problem, UsageError
from rackrun.run_folder import new_run_folder
from rackrun.shapes import AtMost, Between, Misshapen, shaped
from rackrun.tables import table
from rackrun.terminal import one_line
from rackrun.units import plural, whole_number

OPTION = "--scaling"
HEAD = ("hosts", "ranks", "images/s", "range", "efficiency")


@dataclass(frozen=True)
class Speed:
    """The part of a run's report with --synthetic that shows its throughput."""

    ranks: Annotated[int, Between(1, 2**31)]
    images: Annotated[int, Between(1, 2**31)]  # per rank and step
    steps: Annotated[tuple[Annotated[float, Between(1e-9, 1e9)], ...], AtMost(8)]
    """Seconds of a step, by window."""

    @property
    def rates(self) -> list[float]:
        """Images per second of all ranks, by window."""
        return [self.images * self.ranks / seconds for seconds in self.steps]


def measure_scaling(
    work: Work,
    counts: list[int],
    jobs: JobTemplate,
    launch: Callable[[int, JobTemplate], Result],
) -> int:
    """Launch once for every count, print the throughput of each, and return the exit code."""
    if not isinstance(work, TaskWork) or "--synthetic" not in work.options:
        raise UsageError(f"{OPTION} is for a task with --synthetic: imagenet --synthetic")
    folder = new_run_folder(jobs.runs, f"{jobs.name or work.name}-scaling", jobs.share)
    runs = jobs.runs / folder.path.name
    speeds: dict[int, Speed] = {}
    for count in counts if len(counts) == 1 else (*counts, counts[0]):
        result = launch(count, replace(jobs, name=f"{work.name}-{count}", runs=runs, typed=()))
        if result.exit_code:
            return result.exit_code
        speed = speed_of(result)
        if count in speeds:
            speed = replace(speed, steps=(*speeds[count].steps, *speed.steps))
        speeds[count] = speed
    sys.stdout.write(f"{shown(speeds)}runs: {folder.path}\n")
    sys.stdout.flush()
    return 0


def counts_of(text: str, limit: int) -> list[int]:
    """Return the counts in rising order; UsageError for an invalid one, or more than there are."""
    numbers = [whole_number(number.strip(), MOST_HOSTS) for number in text.split(",")]
    counts = sorted({number for number in numbers if number})
    if not all(numbers):
        hint = "type how many hosts to run on, as in 1,2,4,8"
        raise UsageError(f"{OPTION} {one_line(text)[:40]}: {hint}")
    if counts[-1] > limit:
        raise UsageError(f"{OPTION} {text[:40]}: there are only {plural(limit, 'host')}")
    return counts


def speed_of(result: Result) -> Speed:
    """Return the throughput that a run reported; raises Problem if it reported none."""
    report = result.report.get("speed")
    fields = report if isinstance(report, Mapping) else {}
    ours = {name: fields[name] for name in ("ranks", "images", "steps") if name in fields}
    try:
        speed: Speed = shaped(ours, Speed, "speed")
        if not speed.steps:
            raise Misshapen("speed.steps: empty")
    except Misshapen as error:
        why = f"the run reported no speed ({error}); look into {result.folder}"
        raise Problem(why) from error
    return speed


def shown(speeds: Mapping[int, Speed]) -> str:
    """Return a row per number of hosts.

    Efficiency is the speed of a rank relative to the first row's, at worst and at best.
    """
    first = next(iter(speeds.values()))
    rows = []
    for hosts, speed in speeds.items():
        low, high = min(speed.rates), max(speed.rates)
        ranks = speed.ranks / first.ranks
        worst, best = low / max(first.rates) / ranks, high / min(first.rates) / ranks
        efficiency = "100%" if speed is first else f"{100 * worst:.0f}-{100 * best:.0f}%"
        rate, width = f"{median(speed.rates):,.1f}", f"{low:,.1f}-{high:,.1f}"
        rows.append((f"{hosts}", f"{speed.ranks}", rate, width, efficiency))
    return table(HEAD, rows, numbers=HEAD)
