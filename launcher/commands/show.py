"""`--check` and `--dry-run`: inspect the hosts, print findings or the plan, and start nothing.

`--deep` is the exception: it measures in a run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from launcher.commands.settings import SshOptions
from launcher.commands.upload import code_there
from launcher.lifecycle.attempts import Launch
from launcher.lifecycle.launch_settings import LaunchSettings
from launcher.lifecycle.planning import code_here, plan_for, preflight, refuse_ranks
from launcher.lifecycle.restart_policy import RestartState
from launcher.preflight import check_table
from launcher.preflight.checks import CHECKS, examine, refusal
from launcher.preflight.facts import NO_FACTS, ClusterFacts, gather_facts
from launcher.run.hosts import Host
from launcher.run.job import Command, Work, data_of, is_on_cpu
from launcher.run.plan import shown
from launcher.transport.base import Transport
from rackrun.contract.task_needs import TaskNeeds
from rackrun.errors import Problem


def check(
    hosts: Sequence[Host],
    transports: Sequence[Transport | Problem],
    work: Work,
    settings: LaunchSettings,
    as_json: bool,
    excluded: Sequence[Path],
) -> int:
    """Print a table of all checks; return the exit code of a launch.

    `excluded` are files here that are not code, such as the host file.
    """
    code = code_here(settings.jobs.runs, excluded=excluded)
    cluster = gather_facts(hosts, transports, settings.requirements(work, code, full=True))
    cluster.close()
    rows = examine(cluster, CHECKS, settings.ignored_checks, settings.pending)
    text = (
        json.dumps([asdict(row) for row in rows], indent=2) if as_json else check_table.shown(rows)
    )
    sys.stdout.write(f"{text.rstrip()}\n")
    sys.stdout.flush()
    error = refusal(cluster, rows)
    if error is None:
        active = RestartState(settings.restarts, tuple(hosts)).active()
        refuse_ranks(cluster.first(len(active)))
    return error.exit_code if error else 0


def deep_check(
    hosts: Sequence[Host],
    transports: Sequence[Transport | Problem],
    work: Work,
    settings: LaunchSettings,
    options: SshOptions,
) -> Launch:
    """Return the run that measures the hosts, after they have passed all checks."""
    reached = [transport for transport in transports if not isinstance(transport, Problem)]
    program = _measuring(work, hosts)
    code = code_there(hosts, reached, program, options)
    jobs = replace(settings.jobs, name="deep-check", settings="", elastic=False)
    needs = TaskNeeds(packages=("training",))  # which an interpreter of python= may not have
    return Launch(hosts, reached, program, replace(settings, jobs=jobs).with_needs(needs), code)


def _measuring(work: Work, hosts: Sequence[Host]) -> Command:
    """Return the program that measures hosts, and reads the shards that the work would read."""
    names = ",".join(host.label for host in hosts)
    data = data_of(work)
    return Command(
        (
            *("python", "-u", "-m", "training", "deep-check", "--hosts", names),
            *(("--data", data) if data else ()),
            *(("--device", "cpu") if is_on_cpu(work) else ()),
        )
    )


def show_plan(
    hosts: Sequence[Host],
    transports: Sequence[Transport],
    work: Work,
    settings: LaunchSettings,
    as_json: bool,
    excluded: Sequence[Path] = (),
    probed: ClusterFacts = NO_FACTS,
) -> int:
    """Inspect the hosts and print what would run there; return 0."""
    code = code_here(settings.jobs.runs, excluded=excluded)
    state, jobs = RestartState(settings.restarts, tuple(hosts)), settings.jobs
    active = state.active()
    spares = len(state.reserve()) if jobs.elastic else 0
    with preflight(hosts, transports, work, settings, code, earlier=probed) as cluster:
        refuse_ranks(cluster.first(len(active)))
        job = jobs.job(work, jobs.planned_folder(work))
        plan = plan_for(job, cluster.first(len(active) + spares), settings, spares)
    sys.stdout.write(shown(plan, as_json))
    return 0
