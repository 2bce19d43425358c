"""A run on this machine: serve data, check, draw the demo, launch."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace

from launcher.commands.parse import recorded
from launcher.lifecycle.launch_settings import resolved
from launcher.lifecycle.serving import served
from launcher.lifecycle.task_check import (
    DEMO,
    check_gpus,
    check_task_options,
    make_demo_data,
    refuse_absent_run,
    refuse_unready_data,
)
from launcher.lifecycle.this_machine import (
    ADDRESS,
    NAME,
    as_host,
    interpreter,
    plan_alone,
    run_alone,
)
from launcher.run.job import JobTemplate, Work
from launcher.run.plan import shown
from launcher.run.result import Result
from launcher.run.settings import HostOptions, LocalOptions, RankOptions
from launcher.transport.local import LocalTransport

MOST_PROCESSES = 1024  # of a sweep on this machine


def start(work: Work | None, options: LocalOptions, typed: tuple[str, ...]) -> int:
    """Check, plan or launch as the options demand; return the exit code.

    `typed` is the command to type again.
    """
    demo = work is None
    work = work or DEMO
    jobs = options.jobs
    planned = jobs.job(work, jobs.planned_folder(work))
    plan_alone(planned, options.nproc, options.python)  # refuses invalid usage
    check_gpus(work, NAME, interpreter(options.python), options.image)
    if options.dry_run:
        return show(work, options)
    if demo and (code := make_demo_data()):
        return code
    if options.scaling:
        from launcher.scaling.sweep import sweep

        return sweep(
            work,
            options.scaling,
            MOST_PROCESSES,
            jobs,
            lambda count, own: launch_local(
                work, replace(options, nproc=count, name=own.name, runs=own.runs)
            ),
        )
    return launch_local(work, options, typed).exit_code


def stay(work: Work, options: LocalOptions) -> Result:
    """Launch, and return the result."""
    check_gpus(work, NAME, interpreter(options.python), options.image)
    return launch_local(work, options)


def show(work: Work, options: LocalOptions) -> int:
    """Print what would run here; return 0."""
    if options.image:
        return _show_container(work, options)
    jobs = options.jobs
    with served(work, options.serving, [ADDRESS]) as there:
        job = jobs.job(there, jobs.planned_folder(work))
        sys.stdout.write(shown(plan_alone(job, options.nproc, options.python), options.json))
    return 0


def launch_local(work: Work, options: LocalOptions, again: tuple[str, ...] = ()) -> Result:
    """Launch on this machine, and return the result; `again` is the typed command."""
    jobs = recorded("local", options, work, again)
    with check_task_options(work, "local") as refuse:
        if not options.image:  # where in a container the data are, only the container knows
            refuse_unready_data(work)
            refuse_absent_run(work, jobs.runs)
        refuse()
    with served(work, options.serving, [ADDRESS]) as there:
        if options.image:
            return _launch_contained(there, options, jobs)
        return run_alone(jobs, there, options.nproc, options.python, options.plain)


def _launch_contained(work: Work, options: LocalOptions, jobs: JobTemplate) -> Result:
    """Launch in a container on this machine, which is checked like any host."""
    from launcher.lifecycle.attempts import Launch, run_to_end
    from launcher.lifecycle.planning import code_here

    there = _host_options(options)
    settings = resolved(there, replace(jobs, environment=there.environment))
    places, code = [LocalTransport(NAME)], code_here(settings.jobs.runs)
    return run_to_end(Launch([as_host(options.nproc)], places, work, settings, code))


def _show_container(work: Work, options: LocalOptions) -> int:
    """Print what would run in a container."""
    from launcher.commands.show import show_plan

    settings, places = resolved(_host_options(options)), [LocalTransport(NAME)]
    with served(work, options.serving, [ADDRESS]) as there:
        return show_plan([as_host(options.nproc)], places, there, settings, options.json)


def _host_options(options: LocalOptions) -> HostOptions:
    """Return the options for a host; a container sees the GPUs that this launcher may use."""
    same = {field.name: getattr(options, field.name) for field in fields(RankOptions)}
    visible = ("CUDA_VISIBLE_DEVICES",) if "CUDA_VISIBLE_DEVICES" in os.environ else ()
    return HostOptions(**{**same, "env": (*visible, *options.env)})
