"""`--check` and `--dry-run`: inspect the hosts, print the checks or the plan, and start nothing.

`--deep` is the exception: it measures in a run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from rackrun.contract.task_needs import TaskNeeds
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.planning import plan_for, preflight, refuse_ranks
from rackrun.launcher.preflight import check_table
from rackrun.launcher.preflight.checks import CHECKS
from rackrun.launcher.preflight.examine import examine, refusal
from rackrun.launcher.preflight.facts import gather_facts
from rackrun.launcher.run.job import Command, data_of, is_on_cpu
from rackrun.launcher.run.plan import shown


def check(spec: LaunchSpec, as_json: bool) -> int:
    """Print a table of all checks; return the exit code of a launch."""
    cluster = gather_facts(spec.hosts, spec.transports, replace(spec, full=True))
    cluster.close()
    rows = examine(cluster, CHECKS)
    as_dicts = [row._asdict() for row in rows]
    text = json.dumps(as_dicts, indent=2) if as_json else check_table.shown(rows)
    sys.stdout.write(f"{text.rstrip()}\n")
    sys.stdout.flush()
    error = refusal(cluster, CHECKS, rows)
    if error is None:
        refuse_ranks(cluster.first(len(spec.restart_state.active())))
    return error.exit_code if error else 0


def deep_check(spec: LaunchSpec) -> LaunchSpec:
    """Return the launch that measures the hosts, after they have passed all checks."""
    options = replace(spec.options, name="deep-check")
    needs = TaskNeeds(packages=("rackrun",))  # which an interpreter of python= may not have
    names = ",".join(host.label for host in spec.hosts)
    program = ["python", "-u", "-m", "rackrun.training", "deep-check", "--hosts", names]
    if data := data_of(spec.work):  # the shards that the work would read
        program += ["--data", data]
    if is_on_cpu(spec.work):
        program += ["--device", "cpu"]
    work = Command(tuple(program))
    return replace(spec, work=work, options=options, settings="", needs=needs)


def show_plan(spec: LaunchSpec, as_json: bool) -> int:
    """Inspect the hosts and print what would run there; return 0."""
    with preflight(spec) as all_hosts:
        cluster = all_hosts.first(len(spec.restart_state.active()))
        refuse_ranks(cluster)
        plan = plan_for(spec.job(spec.planned_folder), cluster)
    sys.stdout.write(shown(plan, as_json))
    return 0
