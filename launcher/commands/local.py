"""`./run-local`: torchrun on this machine, through the same agent as on any other host."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial

from rackrun.commandline.help_page import Head
from rackrun.contract.task_needs import TaskNeeds
from rackrun.errors import UsageError
from rackrun.launcher.commands.parse import from_names, job_template, read, refuse_shared
from rackrun.launcher.commands.show import show_plan
from rackrun.launcher.commands.work import work_of
from rackrun.launcher.lifecycle.attempts import Launch, LocalLaunch
from rackrun.launcher.lifecycle.data_preparation import (
    DEMO,
    NotMade,
    is_to_make,
    make,
    say_what_is_made,
    with_shards,
)
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec, resolved
from rackrun.launcher.lifecycle.planning import code_here
from rackrun.launcher.lifecycle.project import fill_environment
from rackrun.launcher.lifecycle.serving import served
from rackrun.launcher.lifecycle.starter import controlled, may_leave
from rackrun.launcher.lifecycle.task_check import (
    check_gpus,
    check_task_options,
    refuse_absent_program,
    refuse_absent_run,
    refuse_cache,
    refuse_missing_packages,
    refuse_more_than_fit,
    refuse_unready_data,
)
from rackrun.launcher.lifecycle.this_machine import (
    ADDRESS,
    as_host,
    interpreter,
    plan_alone,
    project_interpreter,
)
from rackrun.launcher.output.run_output import Show
from rackrun.launcher.output.screen import shown_here
from rackrun.launcher.run.hosts import THIS_MACHINE
from rackrun.launcher.run.job import JobTemplate, Work
from rackrun.launcher.run.plan import shown
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.settings import HostOptions, LocalOptions, RankOptions
from rackrun.launcher.settings_file import SettingsFile
from rackrun.launcher.transport.local import LocalTransport

HEAD = Head(
    "{prog} [options] [TASK [task options] | -- COMMAND]",
    "Train on this machine with torchrun. Without a task, draw cats and dogs and train on them.",
    (
        ("{prog}", "a demo that needs no data"),
        ("{prog} catdog --data data/shards", "a task"),
        ("{prog} --nproc 2 -- python train.py", "any script, on two ranks"),
        ("{prog} --dry-run catdog --data data/shards", "print what would run"),
        ("{prog} --sweep lr=0.1,0.3 catdog --data ...", "a run for each value"),
    ),
    "{prog} TASK --help shows the options of a task.",
)
"""The head of the help."""


OPTIONS = LocalOptions


def main(args: Sequence[str], again: SettingsFile | None = None) -> int:
    """Run the command line, or a run `again`; return the exit code."""
    line = read("local", LocalOptions, HEAD, args, again)
    if line.options.sweep:
        from rackrun.launcher.search.sweep import sweep  # with numpy

        return sweep("local", line.words, line.work, line.options, [""])
    with line.naming_the_file():
        return start(line.work, line.options, line.again(line.work or DEMO))


def launch(args: Sequence[str], options: Mapping[str, object]) -> Result:
    """Launch from Python: the arguments after the options, and the options by name."""
    work = work_of(args)
    if work is None:
        raise UsageError('nothing to run; for example: launch("catdog", "--epochs", "2")')
    settings = from_names(LocalOptions, options)
    return launch_local(work, settings, shown_here(settings.plain))


def start(work: Work | None, options: LocalOptions, typed: tuple[str, ...]) -> int:
    """Check, plan or launch as the options demand; return the exit code.

    `typed` is the command to type again.
    """
    work = work or DEMO
    if not options.dry_run:
        if may_leave(os.environ):
            return controlled(partial(_launched, work, options, typed), options.plain)
        return _launched(work, options, typed, shown_here(options.plain))
    ready = with_shards(work)
    _refuse_invalid(ready, options, data_exist=not is_to_make(work, ready))
    say_what_is_made(work, ready)
    return show(ready, options)


def _launched(work: Work, options: LocalOptions, typed: tuple[str, ...], show: Show) -> int:
    try:
        return launch_local(work, options, show, typed).exit_code
    except NotMade as problem:  # the lines above say why
        return problem.exit_code


def show(work: Work, options: LocalOptions) -> int:
    """Print what would run here; return 0."""
    with served(work, options.serving, [ADDRESS]) as served_work:
        spec = _spec(served_work, options, options.jobs)
        if options.image:
            return show_plan(spec, options.json)
        job = options.jobs.job(served_work, options.jobs.planned_folder(work))
        plan = plan_alone(job, spec.hosts[0], options.python)
        sys.stdout.write(shown(plan, options.json))
    return 0


def launch_local(
    work: Work, options: LocalOptions, show: Show, again: tuple[str, ...] = ()
) -> Result:
    """Launch on this machine, and return the result; `again` is the typed command."""
    jobs = job_template("local", options, work, again)
    typed, work = work, with_shards(work)
    if is_to_make(typed, work):
        _refuse_invalid(work, options, data_exist=False)
    make(typed, work)
    needs = _refuse_invalid(work, options)
    with served(work, options.serving, [ADDRESS]) as served_work:
        spec = _spec(served_work, options, jobs).with_needs(needs)
        return (Launch if options.image else LocalLaunch)(spec, show).run()


def _refuse_invalid(work: Work, options: LocalOptions, data_exist: bool = True) -> TaskNeeds:
    # A dry run refuses what a launch would. Which packages and files a container has is checked
    # inside it, like those of a host.
    is_here, python = not options.image, interpreter(options.python, work)
    ranks = as_host(options.nproc, options.environment).slots or 1
    with check_task_options(work, "local", local_jobs=options.jobs if is_here else None) as refuse:
        refuse_more_than_fit(work, ranks)
        if is_here and not any(name == "PATH" for name, _ in options.environment):
            refuse_absent_program(work)
            if options.python and not shutil.which(options.python):
                raise UsageError(f"--python {options.python}: no such program; type its path")
        if is_here and not options.dry_run and python == project_interpreter(work, options.python):
            fill_environment(work, python)
        check_gpus(work, ranks, THIS_MACHINE, python, options.image, options.environment)
        if data_exist and is_here:
            refuse_unready_data(work, options.environment)
            refuse_absent_run(work, options.runs)
        needs = refuse_shared(work, refuse())
    if is_here:
        if why := needs.rank_problem(ranks):
            raise UsageError(why)
        refuse_cache(needs)
        refuse_missing_packages(needs, python)
    return needs


def _spec(work: Work, options: LocalOptions, jobs: JobTemplate) -> LaunchSpec:
    same = {field.name: getattr(options, field.name) for field in fields(RankOptions)}
    # a container sees only the GPUs that this launcher may use
    is_limited = options.image and "CUDA_VISIBLE_DEVICES" in os.environ
    visible = ("CUDA_VISIBLE_DEVICES",) if is_limited else ()
    host_options = HostOptions(**{**same, "env": (*visible, *options.env)})
    settings = resolved(host_options, replace(jobs, environment=host_options.environment))
    host = as_host(options.nproc, options.environment)
    code = code_here(jobs.runs) if options.image else None
    return LaunchSpec([host], [LocalTransport(host.name)], work, settings, code)
