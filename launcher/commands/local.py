"""`./run-local`: a launch whose only host is this machine, checked and run as any other host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

from rackrun.commandline.help_page import Head
from rackrun.launcher.commands.launch import LaunchMethod
from rackrun.launcher.commands.reach import with_visible_gpus
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
from rackrun.launcher.remote.gpus import VISIBLE, gpu_count
from rackrun.launcher.run.hosts import THIS_MACHINE, Host
from rackrun.launcher.run.job import Work
from rackrun.launcher.run.settings import HostOptions, LocalOptions, RankOptions
from rackrun.launcher.schedulers import refuse_one_of_many
from rackrun.launcher.transport.local import LocalTransport


class LocalLaunch(LaunchMethod):
    """A launch on this machine."""

    name = "local"
    settings = LocalOptions
    default_work = DEMO
    head = Head(
        "{prog} [options] [TASK [task options] | -- COMMAND]",
        "Run a task or a command under torchrun on this machine. Without either, draw cats and"
        " dogs, and train on them.",
        (
            ("{prog}", "a demo without data"),
            ("{prog} catdog --data data/shards", "a task"),
            ("{prog} --nproc 2 -- python train.py", "a script, on two ranks"),
            ("{prog} --dry-run catdog --data data/shards", "print what would run"),
            ("{prog} --sweep lr=0.1,0.3 catdog --data ...", "a run for each value"),
        ),
        "{prog} TASK --help shows the options of a task.",
    )

    def spec_of(self, work: Work) -> LaunchSpec:
        """Return the launch, whose host is this machine under the options that all hosts have.

        Raise UsageError where a scheduler has started several such launches, or this is a rank.
        """
        refuse_one_of_many(os.environ)
        common = {field.name: getattr(self.options, field.name) for field in fields(RankOptions)}
        if self.options.image and VISIBLE[0] in os.environ:
            # a container sees only the GPUs that this launcher may use
            common["env"] = (VISIBLE[0], *self.options.env)
        return replace(super().spec_of(work), options=HostOptions(**common), is_here=True)

    @contextmanager
    def on_hosts(self, spec: LaunchSpec) -> Iterator[LaunchSpec]:
        """Yield the launch on this machine."""
        options, python = self.options, self.options.python
        if not options.image:
            python = interpreter(options.python, spec.work)
            if not any(name == "PATH" for name, _ in options.environment):
                refuse_absent_program(spec.work, python)
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

    def bring_code(self, spec: LaunchSpec) -> LaunchSpec:
        """Return the launch with the code of a container; fill the environment of a project."""
        if self.options.image:
            return replace(spec, code=code_here(self.options.runs))
        if python := project_interpreter(spec.work, self.options.python):
            fill_environment(python)
        return spec

    def plan_code(self, spec: LaunchSpec) -> LaunchSpec:
        """Return the launch with the code of a container; a project's environment is pending."""
        if self.options.image:
            return replace(spec, code=code_here(self.options.runs))
        if not project_interpreter(spec.work, self.options.python):
            return spec
        filled = dict.fromkeys(("python", "torch", "packages"), "uv sync fills the environment")
        return replace(spec, pending={**spec.pending, **filled})


main = LocalLaunch.main
