"""`--check` and `--dry-run`: look at the hosts, print what was found or planned, start nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from launcher.lifecycle.launch_settings import LaunchSettings
from launcher.lifecycle.planning import code_here, look, plan_for
from launcher.lifecycle.restart_policy import RestartState
from launcher.preflight import check_table
from launcher.preflight.checks import CHECKS, examine, refusal
from launcher.preflight.facts import survey
from launcher.run.hosts import Host
from launcher.run.job import Work
from launcher.run.plan import shown
from launcher.transport.base import Transport
from rackrun.errors import Problem


def check(
    hosts: Sequence[Host],
    places: Sequence[Transport | Problem],
    work: Work,
    settings: LaunchSettings,
    as_json: bool,
    own: Sequence[Path],
) -> int:
    """Print a table of all checks; return the exit code with which a run would be refused.

    `own` are files here that are not code, such as the host file.
    """
    code = code_here(settings.jobs.runs, own=own)
    found = survey(hosts, places, settings.requirements(work, code, full=True))
    found.close()
    rows = examine(found, CHECKS, settings.ignored_checks, settings.pending)
    text = (
        json.dumps([asdict(row) for row in rows], indent=2) if as_json else check_table.shown(rows)
    )
    sys.stdout.write(f"{text.rstrip()}\n")
    sys.stdout.flush()
    error = refusal(found, rows)
    return error.exit_code if error else 0


def show_plan(
    hosts: Sequence[Host],
    places: Sequence[Transport],
    work: Work,
    settings: LaunchSettings,
    as_json: bool,
    own: Sequence[Path] = (),
) -> int:
    """Look at the hosts and print what would run there; return 0."""
    code = code_here(settings.jobs.runs, own=own)
    active = RestartState(settings.restarts, tuple(hosts)).active()
    jobs = settings.jobs
    with look(hosts, places, work, settings, code) as found:
        job = jobs.job(work, jobs.planned_folder(work))
        plan = plan_for(job, found.first(len(active)), settings)
    sys.stdout.write(shown(plan, as_json))
    return 0
