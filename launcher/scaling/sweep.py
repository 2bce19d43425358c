"""`--scaling 1,2,4,8`: the same synthetic run on more and more hosts, a table, and the curve.

    counts -> a run each -> Point -> scaling.json, scaling.png, lines on standard output

What another network would do is predicted from the smallest run, whose step exchanges the least,
and from the largest one, which shows how much of the exchange overlaps with backward:

    exchange = bytes of gradients x 2 (n - 1) / n / bandwidth        n ranks in a ring
    added    = max(exchange x (1 - hidden), exchange - backward)
    step     = step of the smallest run without its exchange + added

`hidden` is the share of the exchange that did not add to a step. The ring crosses each host's link
once in each direction, however many ranks the host has. Latency is left out: it counts where models
are small or ranks are hundreds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace

from launcher.output.tables import table
from launcher.run.job import JobTemplate, RunFolder, TaskWork, Work, new_run_folder
from launcher.run.result import Result
from launcher.scaling.model import Curve, Point
from rackrun.errors import Problem, UsageError
from rackrun.shapes import Misshapen, shaped
from rackrun.units import plural

OPTION = "--scaling"
MEASURED = (
    *("hosts", "ranks", "images/s", "per rank", "efficiency"),
    *("exchange", "alone", "hidden", "Gbit/s"),
)
GIGABITS = (1, 10, 25, 100, 400)  # networks to predict for, per host and direction


def hoisted(own: Sequence[str], rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's options and the task's, `--scaling` among the former wherever it stands."""
    taken, kept = list(own), list(rest)
    for place, word in enumerate(rest if rest[:1] != ["--"] else ()):
        if word.partition("=")[0] == OPTION:
            words = 1 if "=" in word else 2
            taken += kept[place : place + words]
            del kept[place : place + words]
            break
    return taken, kept


def sweep(
    work: Work,
    scaling: str,
    limit: int,
    jobs: JobTemplate,
    launch: Callable[[int, JobTemplate], Result],
) -> int:
    """Launch once for every count, at most `limit`; show the curve and return the exit code."""
    counts = counts_of(scaling, limit)
    if not isinstance(work, TaskWork) or "--synthetic" not in work.options:
        raise UsageError(f"{OPTION} is for a task with --synthetic: imagenet --synthetic")
    folder = new_run_folder(jobs.runs, f"{jobs.name or work.name}-scaling", jobs.share)
    points: list[Point] = []
    for count in counts:
        own = replace(
            jobs, name=f"{work.name}-{count}", runs=jobs.runs / folder.path.name, typed=()
        )
        result = launch(count, own)
        if result.exit_code:
            return result.exit_code
        points.append(point_of(count, result))
    show(Curve(tuple(points)), folder)
    return 0


def counts_of(text: str, limit: int) -> list[int]:
    """The counts in rising order; UsageError for what is none, or more than there is."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"{OPTION} {text}: type how many hosts to run on, as in 1,2,4,8")
    counts = sorted({int(word) for word in words})
    if counts[-1] > limit:
        raise UsageError(f"{OPTION} {text}: there are only {plural(limit, 'host')}")
    return counts


def point_of(hosts: int, result: Result) -> Point:
    """Return the measurement that a run reported."""
    speed = result.report.get("speed")
    reported = speed if isinstance(speed, Mapping) else {}
    names = [field.name for field in fields(Point) if field.name != "hosts"]
    measured = {name: reported[name] for name in names if name in reported}
    try:
        point: Point = shaped({"hosts": hosts, **measured}, Point, "speed")
    except Misshapen as error:
        why = f"the run reported no speed ({error}); look into {result.folder}"
        raise Problem(why) from error
    return point


def show(curve: Curve, folder: RunFolder) -> None:
    """Write the numbers and the plot into the folder, and print the table."""
    predicted = {
        gigabits: {hosts: round(curve.predicted(hosts, gigabits), 4) for hosts in curve.hosts}
        for gigabits in (GIGABITS if curve.predicts else ())
    }
    content = {"points": [asdict(point) for point in curve.points], "predicted": predicted}
    (folder.path / "scaling.json").write_text(json.dumps(content, indent=2) + "\n")
    from launcher.scaling.plot import draw  # it takes longer to import than all the rest

    plot = folder.path / "scaling.png"
    plot.write_bytes(draw(curve, GIGABITS))
    sys.stdout.write(f"{shown(curve)}curve: {plot}\n")
    sys.stdout.flush()


def shown(curve: Curve) -> str:
    """Return the measured points, then the predicted efficiencies."""
    measured = table(MEASURED, [_cells(curve, point) for point in curve.points], numbers=True)
    if not curve.predicts:
        return (
            f"{measured}no prediction: it needs two ranks, and gradients as float32 or bfloat16\n"
        )
    predicted = [
        (f"{hosts}", *(f"{curve.predicted(hosts, gigabits):.1%}" for gigabits in GIGABITS))
        for hosts in curve.hosts
    ]
    title = "predicted efficiency by the network's Gbit/s (each way, per host):"
    return f"{measured}\n{title}\n{table(('hosts', *map(str, GIGABITS)), predicted, numbers=True)}"


def _cells(curve: Curve, point: Point) -> tuple[str, ...]:
    return (
        f"{point.hosts}",
        f"{point.ranks}",
        f"{point.rate:,.1f}",
        f"{point.rate / point.ranks:,.1f}",
        f"{curve.efficiency(point):.1%}",
        f"{point.exchange * 1e3:.1f} ms",
        f"{point.sending * 1e3:.1f} ms",
        f"{point.hidden:.0%}",
        f"{point.gigabits:.2f}",
    )
