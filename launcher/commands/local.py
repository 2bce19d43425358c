"""`./run-local`: a launch whose only host is this machine, checked and run as any other host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial

from rackrun.commandline.help_page import Head
from rackrun.errors import UsageError
from rackrun.launcher.commands.launch import LaunchMethod
from rackrun.launcher.commands.parse import from_names, kept_settings, read
from rackrun.launcher.commands.reach import with_visible_gpus
from rackrun.launcher.commands.work import work_of
from rackrun.launcher.lifecycle.data_preparation import DEMO
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.planning import code_here
from rackrun.launcher.lifecycle.task_check import refuse_absent_program
from rackrun.launcher.lifecycle.this_machine import (
    LOOPBACK,
    fill_environment,
    interpreter,
    project_interpreter,
)
from rackrun.launcher.output.screen import shown_here
from rackrun.launcher.remote.gpus import VISIBLE, gpu_count
from rackrun.launcher.run.hosts import THIS_MACHINE, Host
from rackrun.launcher.run.job import Work
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.settings import HostOptions, LocalOptions, RankOptions
from rackrun.launcher.schedulers import refuse_one_of_many
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
    options, work = line.options, line.work or DEMO
    if options.sweep:
        from rackrun.launcher.search.sweep import sweep  # with numpy

        return sweep("local", line.words, line.work, options, [""])
    with line.naming_the_file():
        spec, here = spec_of(work, options, line.again(work)), launch_method(options)
        return here.show(spec) if options.dry_run else here.start(spec)


def launch(args: Sequence[str], options: Mapping[str, object]) -> Result:
    """Launch from Python: the arguments after the options, and the options by name."""
    work = work_of(args)
    if work is None:
        raise UsageError('nothing to run; for example: launch("catdog", "--epochs", "2")')
    settings = from_names(LocalOptions, options)
    return launch_method(settings).run(spec_of(work, settings), shown_here(settings.plain))


def spec_of(work: Work, options: LocalOptions, typed: tuple[str, ...] = ()) -> LaunchSpec:
    """Return the launch, whose host is this machine under the options that all hosts have.

    Raise UsageError where a scheduler has started several such launches, or this is a rank.
    """
    refuse_one_of_many(os.environ)
    common = {field.name: getattr(options, field.name) for field in fields(RankOptions)}
    if options.image and VISIBLE[0] in os.environ:
        # a container sees only the GPUs that this launcher may use
        common["env"] = (VISIBLE[0], *options.env)
    settings = kept_settings("local", options, work, typed)
    return LaunchSpec(work, HostOptions(**common), typed, settings, is_here=True)


def launch_method(options: LocalOptions) -> LaunchMethod:
    """Return the method of launching on this machine."""
    return LaunchMethod(
        ("local",),
        partial(_here, options=options),
        partial(_with_environment, options=options),
        partial(_with_planned_environment, options=options),
    )


@contextmanager
def _here(spec: LaunchSpec, options: LocalOptions) -> Iterator[LaunchSpec]:
    python = options.python
    if not options.image:
        python = interpreter(options.python, spec.work)
        if not any(name == "PATH" for name, _ in options.environment):
            refuse_absent_program(spec.work)
    host = Host(THIS_MACHINE, slots=options.nproc or None, address=LOOPBACK)
    if gpu_count():
        visible = ((name, os.environ[name]) for name in VISIBLE if name in os.environ)
        host = with_visible_gpus(host, (*visible, *options.environment))
    yield replace(
        spec,
        options=replace(spec.options, python=python),
        hosts=[host],
        transports=[LocalTransport(host.name)],
        addresses=[LOOPBACK],
    )


def _with_environment(spec: LaunchSpec, options: LocalOptions) -> LaunchSpec:
    if options.image:
        return replace(spec, code=code_here(options.runs))
    if python := project_interpreter(spec.work, options.python):
        fill_environment(python)
    return spec


def _with_planned_environment(spec: LaunchSpec, options: LocalOptions) -> LaunchSpec:
    if options.image:
        return replace(spec, code=code_here(options.runs))
    if not project_interpreter(spec.work, options.python):
        return spec
    filled = dict.fromkeys(("python", "torch", "packages"), "uv sync fills the environment")
    return replace(spec, pending={**spec.pending, **filled})
