"""`./run-local`: torchrun on this machine, through the same agent as on any other host."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from launcher.commands.parse import (
    from_names,
    parse,
    read_work,
    recorded,
    split,
    takes_settings_file,
    typed,
    work_of,
)
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
from launcher.run.settings import HostOptions, RankOptions, ScalingOptions
from launcher.scaling.sweep import hoisted, sweep
from launcher.transport.local import LocalTransport
from rackrun.errors import UsageError

MOST_PROCESSES = 1024  # of a sweep on this machine


@dataclass(frozen=True)
class LocalOptions(RankOptions, ScalingOptions):
    """Options of `./run-local`."""

    nproc: int = 0
    """Ranks to start (also: --nproc-per-node); 0: one per GPU, or a single one without GPUs."""

    def __post_init__(self) -> None:
        """Refuse fewer ranks than none."""
        super().__post_init__()
        if self.nproc < 0:
            raise UsageError(f"--nproc {self.nproc}: cannot start fewer than one process")


@takes_settings_file(LocalOptions)
def main(args: Sequence[str]) -> int:
    """Run what the command line asks for, and return the exit code."""
    own, rest = hoisted(*split(args, LocalOptions))
    options = parse(LocalOptions, "local", own, description()) if own else LocalOptions()
    work = read_work("local", LocalOptions, own, rest)
    if options.sweep:
        from launcher.search.sweep import sweep as search

        return search("local", own, work, options, [""])
    demo = work is None
    work = work or DEMO
    jobs = options.jobs
    again = typed("local", own, work)
    planned = jobs.job(work, jobs.planned_folder(work))
    plan_alone(planned, options.nproc, options.python)  # refuses what cannot be meant
    check_gpus(work, NAME, interpreter(options.python), options.image)
    if options.dry_run:
        if options.image:
            return show_container(work, options)
        with served(work, options.serving, [ADDRESS]) as there:
            job = jobs.job(there, jobs.planned_folder(work))
            plan = plan_alone(job, options.nproc, options.python)
            sys.stdout.write(shown(plan, options.json))
        return 0
    if demo and (code := make_demo_data()):
        return code
    if options.scaling:
        return sweep(
            work,
            options.scaling,
            MOST_PROCESSES,
            jobs,
            lambda count, own: launch_local(
                work, replace(options, nproc=count, name=own.name, runs=own.runs)
            ),
        )
    return launch_local(work, options, again).exit_code


def launch(words: Sequence[str], options: Mapping[str, object]) -> Result:
    """Launch from Python: the words after the options, and the options by name."""
    work = work_of(words)
    if work is None:
        raise UsageError('nothing to run; for example: launch("catdog", "--epochs", "2")')
    settings = from_names(LocalOptions, options)
    check_gpus(work, NAME, interpreter(settings.python), settings.image)
    return launch_local(work, settings)


def launch_local(work: Work, options: LocalOptions, again: tuple[str, ...] = ()) -> Result:
    """Run something on this machine; `again` is the command that was typed."""
    jobs = recorded("local", options, work, again)
    with check_task_options(work, "local") as refuse:
        if not options.image:  # where in a container the data are, only the container knows
            refuse_unready_data(work)
            refuse_absent_run(work, jobs.runs)
        refuse()
    with served(work, options.serving, [ADDRESS]) as there:
        if options.image:
            return launch_contained(there, options, jobs)
        return run_alone(jobs, there, options.nproc, options.python, options.plain)


def launch_contained(work: Work, options: LocalOptions, jobs: JobTemplate) -> Result:
    """Run something in a container on this machine, which is looked at as any host is."""
    from launcher.commands.resolve import resolved
    from launcher.lifecycle.attempts import Launch, run_to_end
    from launcher.lifecycle.planning import code_here

    there = host_options(options)
    settings = resolved(there, replace(jobs, environment=there.environment))
    places, code = [LocalTransport(NAME)], code_here(settings.jobs.runs)
    return run_to_end(Launch([as_host(options.nproc)], places, work, settings, code))


def show_container(work: Work, options: LocalOptions) -> int:
    """Print what would run in a container."""
    from launcher.commands.resolve import resolved
    from launcher.commands.show import show_plan

    settings, places = resolved(host_options(options)), [LocalTransport(NAME)]
    with served(work, options.serving, [ADDRESS]) as there:
        return show_plan([as_host(options.nproc)], places, there, settings, options.json)


def host_options(options: LocalOptions) -> HostOptions:
    """Return the options for a host; a container sees the GPUs that this launcher may use."""
    same = {field.name: getattr(options, field.name) for field in fields(RankOptions)}
    visible = ("CUDA_VISIBLE_DEVICES",) if "CUDA_VISIBLE_DEVICES" in os.environ else ()
    return HostOptions(**{**same, "env": (*visible, *options.env)})


def description() -> str:
    """Return the head of the help."""
    return (
        "{prog} [options] [TASK [task options] | -- COMMAND]: torchrun on this machine.\n"
        "Tasks: {tasks}; {prog} TASK --help shows the options of a task.\n"
        "Without a task: draws a set of cats and dogs and trains on it."
    )
