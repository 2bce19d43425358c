"""`--scaling 1,2,4,8`: the same synthetic run on more and more hosts, a table, and the curve.

    counts -> a run each -> Point -> scaling.json, scaling.png, lines on standard output

The smallest size, against which all others are judged, is run once more at the end, so that a
change of the hosts' speed meanwhile shows as a spread of its windows.

What another network would do is predicted from the smallest run, whose step exchanges the least,
and from the largest one, which shows how much of the exchange overlaps with backward:

    exchange = bytes of gradients x 2 (n - 1) / n / bandwidth        n ranks in a ring
    added    = max(exchange x (1 - hidden), exchange - backward, exchange of the smallest run)
    step     = step of the smallest run without its exchange + added

`hidden` is the share of the exchange that did not add to a step. The ring crosses each host's link
once in each direction, however many ranks the host has. Latency is left out: it counts where models
are small or ranks are hundreds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace

from launcher.run.hosts import MOST_HOSTS
from launcher.run.job import JobTemplate, RunFolder, TaskWork, Work, new_run_folder
from launcher.run.result import Result
from launcher.run.settings import SCALING
from launcher.scaling.model import GIGABITS, TOLERATED, Curve, Point, Spread, spread
from rackrun.errors import Problem, UsageError
from rackrun.shapes import Misshapen, shaped
from rackrun.tables import table
from rackrun.terminal import one_line
from rackrun.units import plural, whole_number

MEASURED = (
    *("hosts", "ranks", "images/s", "spread", "efficiency"),
    *("exchange", "alone", "hidden", "Gbit/s"),
)
FASTER = (
    "over 100%: each rank of the smallest run was slower than those of a larger one, which is no"
    " effect of more hosts; type the command again when nothing else runs on them\n"
)


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
        raise UsageError(f"{SCALING} is for a task with --synthetic: imagenet --synthetic")
    folder = new_run_folder(jobs.runs, f"{jobs.name or work.name}-scaling", jobs.share)
    points: dict[int, Point] = {}
    for count in counts if len(counts) == 1 else (*counts, counts[0]):
        own = replace(
            jobs, name=f"{work.name}-{count}", runs=jobs.runs / folder.path.name, typed=()
        )
        result = launch(count, own)
        if result.exit_code:
            return result.exit_code
        point = _point_of(count, result)
        points[count] = points[count].plus(point) if count in points else point
    show(Curve(tuple(points.values())), folder)
    return 0


def counts_of(text: str, limit: int) -> list[int]:
    """Return the counts in rising order; UsageError for an invalid one, or more than there are."""
    words = [word.strip() for word in text.split(",")]
    found = [whole_number(word, MOST_HOSTS) for word in words]
    counts = sorted({count for count in found if count})
    if not all(found):
        hint = "type how many hosts to run on, as in 1,2,4,8"
        raise UsageError(f"{SCALING} {one_line(text)[:40]}: {hint}")
    if counts[-1] > limit:
        raise UsageError(f"{SCALING} {text[:40]}: there are only {plural(limit, 'host')}")
    return counts


def _point_of(hosts: int, result: Result) -> Point:
    """Return the measurement that a run reported."""
    speed = result.report.get("speed")
    reported = speed if isinstance(speed, Mapping) else {}
    names = [field.name for field in fields(Point) if field.name != "hosts"]
    measured = {name: reported[name] for name in names if name in reported}
    try:
        point: Point = shaped({"hosts": hosts, **measured}, Point, "speed")
        if len({len(values) for values in point.windows} | {0}) != 2:
            raise Misshapen("speed: its parts were not measured in the same windows")
    except Misshapen as error:
        why = f"the run reported no speed ({error}); look into {result.folder}"
        raise Problem(why) from error
    return point


def show(curve: Curve, folder: RunFolder) -> None:
    """Write the numbers and the plot into the folder, and print the table."""
    why = refusal(curve)
    content = {
        "points": [
            {**asdict(point), "rate": point.rate, "efficiency": curve.efficiency(point)}
            for point in curve.points
        ],
        "predicted": None if why else _predictions(curve),
        "no_forecast": why,
    }
    (folder.path / "scaling.json").write_text(json.dumps(content, indent=2) + "\n")
    from launcher.scaling.plot import draw  # it takes longer to import than all the rest

    plot = folder.path / "scaling.png"
    plot.write_bytes(draw(curve, () if why else GIGABITS))
    sys.stdout.write(f"{shown(curve)}curve: {plot}\n")
    sys.stdout.flush()


def refusal(curve: Curve) -> str:
    """Return why other networks cannot be predicted and what to type, or nothing."""
    if not curve.predicts:
        return "it needs two ranks, and gradients as float32 or bfloat16"
    if curve.doubt <= TOLERATED:
        return ""
    return (
        f"the windows leave efficiencies open by up to {100 * curve.doubt:.0f} percentage points;"
        " type the command again when nothing else runs on the hosts, with a larger --batch-size"
        " where steps are short"
    )


def _predictions(curve: Curve) -> dict[int, dict[int, Spread]]:
    return {
        gigabits: {hosts: curve.predicted(hosts, gigabits) for hosts in curve.hosts}
        for gigabits in GIGABITS
    }


def shown(curve: Curve) -> str:
    """Return the measured points, then the predicted efficiencies or why there are none."""
    measured = table(MEASURED, [_cells(curve, point) for point in curve.points], numbers=MEASURED)
    if any(curve.efficiency(point).low > 1 for point in curve.points):
        measured += FASTER
    if why := refusal(curve):
        return f"{measured}no forecast: {why}\n"
    predicted = [
        (f"{hosts}", *(_percent(curve.predicted(hosts, gigabits)) for gigabits in GIGABITS))
        for hosts in curve.hosts
    ]
    title = "predicted efficiency by the network's Gbit/s (each way, per host):"
    head = ("hosts", *map(str, GIGABITS))
    return f"{measured}\n{title}\n{table(head, predicted, numbers=head)}"


def _cells(curve: Curve, point: Point) -> tuple[str, ...]:
    rate = point.rate
    return (
        f"{point.hosts}",
        f"{point.ranks}",
        f"{rate.middle:,.1f}",
        f"±{(rate.high - rate.low) / 2 / rate.middle:.1%}",
        _efficiency(curve, point),
        *_exchange(point),
    )


def _efficiency(curve: Curve, point: Point) -> str:
    """Return it as a range, or in words where the windows of the sizes overlap."""
    found = curve.efficiency(point)
    if point is curve.points[0]:
        return "100%"
    if found.low > 1:
        return "over 100%?"
    return _percent(found) if found.high < 1 else "within the noise"


def _exchange(point: Point) -> tuple[str, ...]:
    """Return what the exchange adds, what it takes alone, how much is hidden, and its speed."""
    added, alone = point.exchange, spread(point.sending)
    seen = f"{added.middle * 1e3:.1f} ms" if added.low else f"< {added.high * 1e3:.1f} ms"
    if not alone.low:
        return (seen if point.ranks > 1 else "-", "-", "-", "-")
    return seen, f"{alone.middle * 1e3:.1f} ms", _percent(point.hidden), f"{point.gigabits:.2f}"


def _percent(found: Spread) -> str:
    """Return a range in whole percent, or one number where both ends are the same."""
    low, high = f"{found.low:.0%}", f"{found.high:.0%}"
    return low if low == high else f"{low[:-1]}-{high}"
