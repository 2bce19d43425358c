"""One launch, wherever its hosts come from.

    options, work -> a source of hosts -> the task's check -> data -> code -> attempts -> result

A source is this machine, a hosts file or list, an allocation of Slurm, or a Ray cluster: it takes
the launch without hosts, and yields the launch on them for as long as they can be reached.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from rackrun.launcher.commands.parse import refuse_shared
from rackrun.launcher.commands.show import show_plan
from rackrun.launcher.lifecycle.attempts import Launch
from rackrun.launcher.lifecycle.data_preparation import (
    NotMade,
    is_to_make,
    make,
    say_what_is_made,
    with_shards,
)
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.serving import served
from rackrun.launcher.lifecycle.starter import controlled, may_leave
from rackrun.launcher.lifecycle.task_check import check_task_options, refuse_absent_data
from rackrun.launcher.output.run_output import Show
from rackrun.launcher.output.screen import shown_here
from rackrun.launcher.preflight.checks import check_allowed
from rackrun.launcher.run.result import Result

Complete: TypeAlias = Callable[[LaunchSpec], LaunchSpec]
"""Adds the code of the hosts to a launch; to one that starts, also brings it there."""


@dataclass(frozen=True)
class LaunchMethod:
    """A method of launching: where the hosts come from, and how their code gets there."""

    called: tuple[str, ...]
    """The command, and what stands between it and a task."""
    source: Callable[[LaunchSpec], AbstractContextManager[LaunchSpec]]
    with_code: Complete = lambda spec: spec
    with_planned_code: Complete = lambda spec: spec

    @contextmanager
    def prepared(self, spec: LaunchSpec) -> Iterator[LaunchSpec]:
        """Yield a launch on its hosts; the options of its task are checked meanwhile."""
        check_allowed(spec.options.ignore_check)
        typed, spec = spec.work, replace(spec, work=with_shards(spec.work))
        is_visible = spec.is_here and not spec.options.image
        if is_visible and not is_to_make(typed, spec.work):
            refuse_absent_data(spec.work, spec.options.runs)
        folder = spec.planned_folder if is_visible else None
        checking = check_task_options(spec.work, *self.called, folder=folder)
        with checking as needs_of_task, self.source(spec) as on_hosts:
            yield on_hosts.with_needs(refuse_shared(spec.work, needs_of_task()))

    def run(self, spec: LaunchSpec, show: Show) -> Result:
        """Launch, and return the result."""
        with self.prepared(spec) as ready:
            make(spec.work, ready.work)
            with served(ready.work, ready.options.serving, ready.addresses) as work:
                return Launch(self.with_code(replace(ready, work=work)), show).run()

    def start(self, spec: LaunchSpec) -> int:
        """Launch, in a controller where a person may leave it; return the exit code."""
        if may_leave(os.environ):
            return controlled(partial(self.exit_code, spec), spec.options.plain)
        return self.exit_code(spec, shown_here(spec.options.plain))

    def exit_code(self, spec: LaunchSpec, show: Show) -> int:
        """Launch, and return the exit code."""
        try:
            return self.run(spec, show).exit_code
        except NotMade as problem:  # the program that was to make the data has said why
            return problem.exit_code

    @contextmanager
    def planned(self, spec: LaunchSpec) -> Iterator[LaunchSpec]:
        """Yield a launch that starts nothing: it says which data and code would be brought."""
        with self.prepared(spec) as ready:
            say_what_is_made(spec.work, ready.work)
            if is_to_make(spec.work, ready.work):
                pending = {**ready.pending, "shards": "made at the start"}
                ready = replace(ready, pending=pending)
            with served(ready.work, ready.options.serving, ready.addresses) as work:
                yield self.with_planned_code(replace(ready, work=work))

    def show(self, spec: LaunchSpec) -> int:
        """Print what would run; return 0."""
        with self.planned(spec) as ready:
            return show_plan(ready, spec.options.json)
