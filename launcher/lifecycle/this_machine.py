"""This machine as a host: what a plan needs to know of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from rackrun.errors import MissingPackage
from rackrun.launcher.remote.files import project_python
from rackrun.launcher.remote.network import interface_of
from rackrun.launcher.run.hosts import THIS_MACHINE, Host
from rackrun.launcher.run.job import Job, Work, is_own_command
from rackrun.launcher.run.plan import Plan, PlannedHost, make_plan
from rackrun.launcher.transport.local import free_port, gpu_count, gpu_model
from rackrun.machine import core_count, typed_folder

ADDRESS = "127.0.0.1"


def plan_alone(job: Job, host: Host, python: str) -> Plan:
    """Return the plan for this machine alone, `host` as `as_host` returns it."""
    folder = str(job.folder.path)
    has_gpus = gpu_count(job.template.environment) > 0
    ranks, path = host.processes(0), interpreter(python, job.work)
    here = planned(host.name, ADDRESS, ranks, folder, path, has_gpus=has_gpus)
    return make_plan(job, [here], free_port())


def planned(
    name: str,
    address: str,
    processes: int,
    folder: str,
    python: str = sys.executable,
    signalled_together: bool = False,
    has_gpus: bool = False,
) -> PlannedHost:
    """Return what a plan needs to know of this machine."""
    return PlannedHost(
        name=name,
        address=address,
        processes=processes,
        python=python,
        workdir=str(typed_folder()),
        folder=folder,
        cores=core_count(),
        gpus=has_gpus,
        gpu_model=gpu_model(),
        interface=interface_of(address),
        agent_python=sys.executable,
        signalled_together=signalled_together,
    )


def as_host(processes: int, environment: Iterable[tuple[str, str]]) -> Host:
    """Return this machine as a host file would name it; ranks have this environment."""
    return Host(THIS_MACHINE, slots=processes or gpu_count(environment) or 1)


def interpreter(python: str, work: Work) -> str:
    """Return the interpreter of the ranks, which are started in another folder than this one."""
    if "/" in python:
        return str(Path(python).absolute())
    if of_project := project_interpreter(work, python):
        return of_project
    if not python and find_spec("torch") is None:
        raise MissingPackage("torch")
    return python or sys.executable


def project_interpreter(work: Work, python: str) -> str:
    """Return the interpreter of the project that the current folder is, if ranks are to use it."""
    return project_python(str(typed_folder())) if is_own_command(work) and not python else ""
