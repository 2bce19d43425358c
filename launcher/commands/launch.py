"""One launch, wherever its hosts come from.

    options, work -> hosts, the task's check -> data -> code -> attempts -> result

The hosts are this machine, those of a file or list, the nodes of an allocation of Slurm, or of a
Ray cluster: a subclass of `LaunchMethod` for each.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from rackrun.commandline.help_page import Head
from rackrun.errors import UsageError
from rackrun.launcher.commands.parse import from_names, read, refuse_shared
from rackrun.launcher.commands.show import show_plan
from rackrun.launcher.commands.work import work_of
from rackrun.launcher.lifecycle.attempts import Attempts
from rackrun.launcher.lifecycle.data_preparation import (
    NotMade,
    is_to_make,
    make_data,
    say_what_is_made,
    with_shards,
)
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.serving import served
from rackrun.launcher.lifecycle.starter import may_outlive_starter, run_in_controller
from rackrun.launcher.lifecycle.task_check import check_task_options, refuse_absent_data
from rackrun.launcher.output.run_output import StartReader
from rackrun.launcher.output.run_printer import printed_here
from rackrun.launcher.preflight.checks import check_allowed
from rackrun.launcher.run.job import Work
from rackrun.launcher.run.result import Result
from rackrun.launcher.settings_file import SettingsFile, settings_text


class LaunchMethod(ABC):
    """A method of launching, with its options."""

    name: ClassVar[str]
    """The command."""
    settings: ClassVar[type[Any]]
    head: ClassVar[Head]
    """The head of its help."""

    def __init__(self, options: Any) -> None:
        """Take options of its settings class."""
        self.options = options

    # -- where the methods differ

    @property
    @abstractmethod
    def default_work(self) -> Work:
        """What runs if nothing is typed."""

    @abstractmethod
    def on_hosts(self, spec: LaunchSpec) -> AbstractContextManager[LaunchSpec]:
        """Yield the launch on its hosts for as long as they can be reached."""

    def bring_code(self, spec: LaunchSpec) -> LaunchSpec:
        """Bring code and environment to the hosts; return the launch with that code."""
        return spec

    def plan_code(self, spec: LaunchSpec) -> LaunchSpec:
        """Return the launch with the code that `bring_code` would bring."""
        return spec

    def spec_of(self, work: Work) -> LaunchSpec:
        """Return the launch, whose hosts are not known yet."""
        settings = settings_text(self.name, self.options, work)
        return LaunchSpec(work, self.options, settings=settings)

    @property
    def words_before_task(self) -> tuple[str, ...]:
        """The command, and what stands between it and a task."""
        return (self.name,)

    @property
    def sweep_groups(self) -> Sequence[str]:
        """The groups of hosts on which runs of a sweep are side by side."""
        return [""]

    def carry_out(self, work: Work | None) -> int:
        """Launch, or show what would run; return the exit code."""
        spec = self.spec_of(work or self.default_work)
        return self.print_plan(spec) if self.options.dry_run else self.start(spec)

    # -- from the command line, and from Python

    @classmethod
    def main(cls, args: Sequence[str], again: SettingsFile | None = None) -> int:
        """Run the command line, or a run `again`; return the exit code."""
        line = read(cls.name, cls.settings, cls.head, args, again)
        method = cls(line.options)
        if getattr(line.options, "sweep", ()):
            from rackrun.launcher.search.sweep import sweep  # with numpy

            groups = method.sweep_groups
            return sweep(cls.name, line.launch_words, line.work, line.options, groups)
        with line.naming_the_file():
            return method.carry_out(line.work)

    @classmethod
    def launch(cls, args: Sequence[str], values: Mapping[str, object]) -> Result:
        """Launch from Python: what is to run, and the options by name."""
        work = work_of(args)
        if work is None:
            raise UsageError('nothing to run; for example: launch("catdog", "--epochs", "2")')
        method = cls(from_names(cls.settings, values))
        return method.run(method.spec_of(work), printed_here(method.options.plain))

    # -- what all methods do

    @contextmanager
    def prepared(self, spec: LaunchSpec) -> Iterator[LaunchSpec]:
        """Yield a launch on its hosts; the options of its task are checked meanwhile."""
        check_allowed(spec.options.ignore_check)
        typed, spec = spec.work, replace(spec, work=with_shards(spec.work, spec.options.runs))
        is_visible = spec.is_here and not spec.options.image
        if is_visible and not is_to_make(typed, spec.work):
            refuse_absent_data(spec.work, spec.options.runs)
        folder = spec.planned_folder if is_visible else None
        checking = check_task_options(spec.work, *self.words_before_task, folder=folder)
        with checking as needs_of_task, self.on_hosts(spec) as reached:
            yield reached.with_needs(refuse_shared(spec.work, needs_of_task()))

    def run(self, spec: LaunchSpec, start_reader: StartReader) -> Result:
        """Launch, and return the result."""
        with self.prepared(spec) as ready:
            make_data(spec.work, ready.work)
            with served(ready.work, ready.options.serving, ready.addresses) as work:
                return Attempts(self.bring_code(replace(ready, work=work)), start_reader).run()

    def start(self, spec: LaunchSpec) -> int:
        """Launch, in a controller where a person may leave it; return the exit code."""
        if may_outlive_starter(os.environ):
            return run_in_controller(partial(self.run_for_exit_code, spec), spec.options.plain)
        return self.run_for_exit_code(spec, printed_here(spec.options.plain))

    def run_for_exit_code(self, spec: LaunchSpec, start_reader: StartReader) -> int:
        """Launch, and return the exit code."""
        try:
            return self.run(spec, start_reader).exit_code
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
                yield self.plan_code(replace(ready, work=work))

    def print_plan(self, spec: LaunchSpec) -> int:
        """Print what would run; return 0."""
        with self.planned(spec) as ready:
            return show_plan(ready, spec.options.json)
