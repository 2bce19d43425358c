"""From hosts that are reached to a plan: probe them, refuse unfit ones, lay out the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rackrun.errors import UsageError
from rackrun.launcher.files.working_tree import WorkingTree, working_tree
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.output.console import say
from rackrun.launcher.preflight.checks import CHECKS
from rackrun.launcher.preflight.examine import are_only_busy, examine, refusal, warnings
from rackrun.launcher.preflight.facts import ClusterFacts, HostFacts, gather_facts
from rackrun.launcher.preflight.gpus import gpu_model
from rackrun.launcher.preflight.replies import Code, Route
from rackrun.launcher.remote.files import PROJECT_LOCK
from rackrun.launcher.run.host_names import grouped
from rackrun.launcher.run.job import Job
from rackrun.launcher.run.plan import Plan, make_plan, scratch_folder
from rackrun.launcher.run.planned_host import PlannedHost
from rackrun.machine import typed_folder

WAIT_SECONDS = 5.0  # between two looks at busy hosts
_CODE = "code"
"""The check of the files on hosts."""


@contextmanager
def preflight(
    spec: LaunchSpec, warn: Callable[[str], object] = say, is_restart: bool = False
) -> Iterator[ClusterFacts]:
    """Ask the hosts the quick part of the preflight; raise HostError when the run cannot start.

    Between attempts, code may change in a folder that all hosts share; a restart accepts that.
    Probes of earlier facts are asked again, with what they hold; all are closed at the end.
    """
    options, reported, latest = spec.options, "", spec.probed
    try:
        while True:
            # The same probes are asked each time: they keep the launch's place in the queue.
            cluster = gather_facts(spec.hosts, spec.transports, spec, latest)
            latest.close(besides=cluster)
            latest = cluster
            codes = [facts[Code] for facts in cluster.hosts if facts.error is None]
            changed_alike = all(code == codes[0] for code in codes)
            accepted = (_CODE,) if is_restart and changed_alike else ()
            rows = examine(cluster, CHECKS, accepted)
            error = refusal(cluster, CHECKS, rows)
            if error is None:
                for line in warnings(rows):
                    warn(f"warning: {line}")
                yield cluster
                return
            if not (options.wait and are_only_busy(rows)):
                raise error
            reported = wait_for_busy(cluster, str(error), reported, warn)
    finally:
        latest.close()


def refuse_ranks(cluster: ClusterFacts) -> None:
    """Raise UsageError where the task cannot run on as many ranks as these hosts have."""
    if why := cluster.requirements.task_needs.rank_problem(cluster.ranks):
        raise UsageError(why)


def environment_lines(cluster: ClusterFacts) -> list[str]:
    """Return lines on which Python ranks of a command use, if this folder has a uv.lock."""
    spec = cluster.requirements
    if spec.is_here or not spec.own_command or spec.image or not Path(PROJECT_LOCK).is_file():
        return []
    hosts: dict[str, list[str]] = {}
    for facts in cluster.hosts:
        hosts.setdefault(facts.basics.python, []).append(facts.host.label)
    return [f"{grouped(names)}: ranks use {python}" for python, names in hosts.items()]


def wait_for_busy(
    cluster: ClusterFacts, reason: str, reported: str, warn: Callable[[str], object]
) -> str:
    """Wait a moment for busy hosts; report the reason unless it was `reported`, and return it."""
    cluster.unlock()
    if reason != reported:
        warn(f"waiting (Ctrl-C ends the wait): {reason}")
    time.sleep(WAIT_SECONDS)
    return reason


def code_here(
    runs: Path, warn: Callable[[str], object] = say, excluded: Sequence[Path] = ()
) -> WorkingTree | None:
    """Return the code in this folder, without run folders and what else is `excluded`."""
    return working_tree(Path.cwd(), warn, excluded, runs)


def plan_for(job: Job, cluster: ClusterFacts) -> Plan:
    """Return the plan for the hosts as they were found."""
    run_folder = cluster.requirements.options.runs / job.folder.path.name
    planned = [
        planned_host(facts, cluster, run_folder, scratch_folder(job.run_id, node))
        for node, facts in enumerate(cluster.hosts)
    ]
    return make_plan(job, planned, cluster.port)


def planned_host(
    facts: HostFacts, cluster: ClusterFacts, run_folder: Path, scratch: str
) -> PlannedHost:
    """Return what the plan needs to know of one host."""
    requirements, host, basics = cluster.requirements, facts.host, facts.basics
    container = requirements.image
    workdir = str(typed_folder()) if requirements.is_here else basics.workdir
    folder = str(Path(workdir) / run_folder)
    devices = ",".join(map(str, host.devices or ()))
    first = facts is cluster.hosts[0]
    python = basics.python
    is_named = host.python or requirements.options.python
    if "python" in requirements.pending and not is_named:  # --sync will make an environment
        python = str(Path(workdir, ".venv", "bin", "python"))
    return PlannedHost(
        name=host.label,
        address=cluster.master if first else host.address or facts[Route].address,
        processes=host.processes(basics.gpus),
        python=python,
        workdir=workdir,
        folder=folder,
        cores=basics.cores,
        gpus=basics.gpus > 0,
        gpu_model=gpu_model(facts),
        interface=host.interface or facts[Route].interface,
        env=(*((("CUDA_VISIBLE_DEVICES", devices),) if devices else ()), *host.env),
        setup=(*host.setup_words, workdir) if host.setup else (),
        agent_python=basics.python,
        locks=() if requirements.is_here else facts.locks,
        container=container.docker_run(
            basics.user, basics.workdir, basics.gpus > 0, folder, Path(scratch).name
        )
        if container
        else (),
    )
