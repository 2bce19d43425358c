"""`status RUN`: show how a run goes, by what its folder has."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
from rackrun.launcher.output.console import progress_words
from rackrun.launcher.output.run_view import read_view
from rackrun.launcher.run.host_names import grouped
from rackrun.launcher.run.settings import OnOptions
from rackrun.run_files import RunPlan, end_in, plan_in
from rackrun.run_folder import RunFolder
from rackrun.runs import SHORT_ID, Run, is_over
from rackrun.tables import table
from rackrun.terminal import one_line
from rackrun.units import duration, plural


@dataclass(frozen=True)
class StatusOptions(OnOptions):
    """Show how a run goes, and the state of every host."""

    examples: ClassVar[Examples] = (
        ("{prog} 3fa8", "the run whose ID begins with 3fa8"),
        ("{prog} --json 3fa8", "as JSON"),
    )

    run: Positional[str] = ""
    """The run: ID, start of an ID, name, folder, or latest (default: list all)."""
    json: bool = False
    """Print the result as JSON."""


def status(run: Run, options: StatusOptions) -> int:
    """Print how the run goes."""
    report = report_of(run)
    sys.stdout.write(f"{json.dumps(report, indent=2)}\n" if options.json else describe(report))
    return 0


def report_of(run: Run) -> dict[str, Any]:
    """Return all that is known, as `--json` prints it."""
    ended, ending = run.is_over, end_in(run.folder)
    view = None if ended else read_view(run.folder)
    return {
        "run": run.id,
        "name": run.name,
        "supervised": not ended,
        "exit_code": ending.exit_code if ending else None,
        "verdict": ending.verdict if ending else "",
        "cause": ending.cause if ending else "",
        "folder": str(run.folder.path),
        "seconds": ending.seconds if ending else view.seconds if view else None,
        "progress": list(progress_words(view)) if view else [],
        "hosts": [host for node in run.folder.of_nodes() for host in _hosts_of(node)],
    }


def _hosts_of(node: RunFolder) -> list[dict[str, Any]]:
    ended = is_over(node)
    if not ended and (view := read_view(node)):
        return [{"name": h.name, "state": h.state, "step": h.step or None} for h in view.hosts]
    ending, plan = end_in(node), plan_in(node) or RunPlan()
    ends = ending.hosts if ending else {}
    otherwise = "not verified" if ended else "starting"
    names = dict.fromkeys([*ends, *(host.name for host in plan.hosts)])
    return [{"name": name, "state": ends.get(name, otherwise), "step": None} for name in names]


def describe(report: dict[str, Any]) -> str:
    """Return the report as text, with hosts that are alike in one row."""
    alike: dict[tuple[str, str], list[str]] = {}
    for host in report["hosts"]:
        step = f"{host['step']:,}" if host["step"] else "-"
        alike.setdefault((one_line(host["state"]), step), []).append(one_line(host["name"]))
    rows = [(grouped(names), *cells) for cells, names in alike.items()]
    states = Counter(one_line(host["state"]) for host in report["hosts"])
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    return (
        f"run {report['run']} {one_line(report['name'])}: {_headline(report)}\n"
        f"folder {one_line(report['folder'])}\n\n"
        f"{table(('hosts', 'state', 'step'), rows, ('hosts', 'state'), ('step',))}\n"
        f"{plural(len(report['hosts']), 'host')}: {counted}\n"
    )


def _headline(report: dict[str, Any]) -> str:
    if report["supervised"]:
        since = "" if report["seconds"] is None else f" for {duration(report['seconds'])}"
        return ", ".join([f"running{since}", *report["progress"]])
    if report["exit_code"] is None:
        stop = f"{called('stop')} {report['run'][:SHORT_ID]}"
        return f"its launcher is gone, and its hosts end it; to verify that, type: {stop}"
    return f"ended with {report['exit_code']}: {one_line(report['cause'])}"
