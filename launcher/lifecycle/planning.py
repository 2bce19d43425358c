"""From hosts that are reached to a plan: look at them, refuse unfit ones, lay out the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from launcher.files.working_tree import WorkingTree, working_tree
from launcher.lifecycle.launch_settings import LaunchSettings
from launcher.output.console import say
from launcher.preflight.checks import CHECKS, are_only_busy, examine, refusal, warnings
from launcher.preflight.facts import FactGatherer, HostFacts, Requirements, survey
from launcher.preflight.gpus import gpu_model
from launcher.run.hosts import Host
from launcher.run.job import Job, Work
from launcher.run.plan import Plan, PlannedHost, make_plan, on_the_host
from launcher.transport.base import Transport
from rackrun.errors import Problem

WAIT_SECONDS = 5.0  # between two looks at busy hosts
_CODE = "code"
"""The check, and the question that it is about."""


@contextmanager
def look(
    hosts: Sequence[Host],
    places: Sequence[Transport],
    work: Work,
    settings: LaunchSettings,
    code: WorkingTree | None,
    warn: Callable[[str], object] = say,
    is_restart: bool = False,
) -> Iterator[FactGatherer]:
    """Ask the hosts the quick part of the preflight; raise HostError when the run cannot start.

    Between attempts, code may change in a folder that all hosts share; a restart accepts that, and
    comes before launches that wait.
    """
    wanted = settings.requirements(work, code)
    wanted = replace(wanted, place="") if is_restart else wanted
    waited_for = ""
    with closing(looks(hosts, places, wanted)) as surveys:
        for found in surveys:
            shared = (_CODE,) if is_restart and _changed_alike(found) else ()
            rows = examine(found, CHECKS, (*settings.ignored_checks, *shared), settings.pending)
            error = refusal(found, rows)
            if error is None:
                for line in warnings(rows):
                    warn(f"warning: {line}")
                yield found
                return
            if not (settings.wait and are_only_busy(rows)):
                raise error
            waited_for = wait_for(found, str(error), waited_for, warn)


def looks(
    hosts: Sequence[Host], places: Sequence[Transport | Problem], wanted: Requirements
) -> Generator[FactGatherer, None, None]:
    """Yield what is found on the hosts, again and again.

    The probes of a look keep the launch's place in the line until those of the next one do.
    Between two looks the caller may connect again, and put that into `places`.
    """
    last = FactGatherer(())
    try:
        while True:
            found = survey(hosts, places, wanted)
            last.close()
            last = found
            yield found
    finally:
        last.close()


def wait_for(found: FactGatherer, busy: str, before: str, warn: Callable[[str], object]) -> str:
    """Wait a moment for busy hosts; report who uses them when that has changed."""
    found.unlock()
    if busy != before:
        warn(f"waiting (Ctrl-C ends the wait): {busy}")
    time.sleep(WAIT_SECONDS)
    return busy


def _changed_alike(found: FactGatherer) -> bool:
    """Return True when all hosts have the same code, and it is not the launcher's."""
    answers = [finding[_CODE] for finding in found.findings if finding.error is None]
    return bool(answers and answers[0]) and all(answer == answers[0] for answer in answers)


def code_here(
    runs: Path, warn: Callable[[str], object] = say, own: Sequence[Path] = ()
) -> WorkingTree | None:
    """Return the code in this folder without the launcher's files: `own` and run folders."""
    return working_tree(Path.cwd(), warn, own, runs)


def plan_for(job: Job, found: FactGatherer, settings: LaunchSettings) -> Plan:
    """Return the plan for the hosts as they were found."""
    run_folder = settings.jobs.runs / job.folder.path.name
    planned = [_planned(finding, found, run_folder, settings) for finding in found.findings]
    return make_plan(job, planned, found.port)


def _planned(
    finding: HostFacts, found: FactGatherer, run_folder: Path, settings: LaunchSettings
) -> PlannedHost:
    """Return what the plan needs to know of one host."""
    container = settings.needs.image
    host, seen = finding.host, finding["look"]
    folder = str(Path(seen["workdir"]) / run_folder)
    devices = ",".join(map(str, host.devices or ()))
    first = finding is found.findings[0]
    return PlannedHost(
        name=host.label,
        address=found.master if first else host.address or finding["route"]["address"],
        processes=host.slots or seen["gpus"] or 1,
        python=_python(finding, settings),
        workdir=seen["workdir"],
        folder=folder,
        cores=seen["cores"],
        gpus=seen["gpus"] > 0,
        gpu_model=gpu_model(finding),
        interface=host.interface or finding["route"].get("interface", ""),
        environment=(*((("CUDA_VISIBLE_DEVICES", devices),) if devices else ()), *host.env),
        agent_python=seen["python"],
        locks=finding.locks,
        container=partial(container.words, seen, folder) if container else on_the_host,
    )


def _python(finding: HostFacts, settings: LaunchSettings) -> str:
    """Return the interpreter of a host's ranks: the one that --sync will make, or today's."""
    seen = finding["look"]
    if "python" in settings.pending and not finding.host.python:
        return str(Path(seen["workdir"], ".venv", "bin", "python"))
    return str(seen["python"])
