"""`./run-ssh`: connect to the hosts, check them, upload code, serve data, and run there."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from rackrun.commandline.conditions import Condition, changed_settings, refuse_without_effect
from rackrun.errors import UsageError
from rackrun.launcher.commands.parse import from_names, job_template, read, refuse_shared
from rackrun.launcher.commands.reach import addresses, chosen, connected, listed
from rackrun.launcher.commands.settings import CHECK_HEAD, SSH_HEAD, SshOptions
from rackrun.launcher.commands.show import check, deep_check, show_plan
from rackrun.launcher.commands.upload import pending, planned_code, with_code
from rackrun.launcher.commands.work import work_of
from rackrun.launcher.lifecycle.attempts import Launch
from rackrun.launcher.lifecycle.data_preparation import (
    NotMade,
    demo_for_hosts,
    is_to_make,
    make,
    say_what_is_made,
    with_shards,
)
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec, resolved
from rackrun.launcher.lifecycle.planning import code_here
from rackrun.launcher.lifecycle.serving import served
from rackrun.launcher.lifecycle.starter import controlled, is_bound, may_leave
from rackrun.launcher.lifecycle.task_check import check_task_options
from rackrun.launcher.output.console import say
from rackrun.launcher.output.run_output import Show
from rackrun.launcher.output.screen import shown_here
from rackrun.launcher.run.job import Command, Work
from rackrun.launcher.run.result import Result
from rackrun.launcher.settings_file import SettingsFile
from rackrun.launcher.viewer.reach import hosts_text
from rackrun.units import first_few

OPTIONS = SshOptions


def main(args: Sequence[str], again: SettingsFile | None = None) -> int:
    """Run the command line, or a run `again`; return the exit code."""
    line = read("ssh", SshOptions, CHECK_HEAD if "--check" in args else SSH_HEAD, args, again)
    options, work = line.options, line.work
    if options.sweep:
        from rackrun.launcher.search.sweep import groups_of, sweep  # with numpy

        groups = groups_of(listed(options), options.sweep_hosts)
        return sweep("ssh", line.words, work, options, groups)
    if work is None:
        # --check without a task asks hosts about no data.
        work = Command(()) if options.check else demo_for_hosts()
    with line.naming_the_file():
        return start(work, options, line.again(work))


def launch(args: Sequence[str], options: Mapping[str, object]) -> Result:
    """Launch from Python: the arguments after the host file, and the options by name."""
    settings = from_names(SshOptions, options)
    return launch_attached(work_of(args) or demo_for_hosts(), settings)


def start(work: Work, options: SshOptions, typed: tuple[str, ...]) -> int:
    """Check, plan or launch as the options demand; `typed` is the command to type again."""
    if options.detach and not options.check:
        refuse_ineffective_wait(work, options)
    if options.check or options.dry_run:
        return _planned(work, options, typed)
    if options.detach:
        if is_bound(os.environ):
            raise UsageError("--detach: process 1 and Slurm steps end with their run; leave it out")
        if is_forwarded(os.environ):
            say(
                "warning: your keys are those of a forwarded agent, which ends with this login:"
                " a restart after that could not log in to the hosts"
            )
        seconds = options.detach_seconds if isinstance(work, Command) else None
        return controlled(partial(_launched, work, options, typed), options.plain, True, seconds)
    if may_leave(os.environ):
        return controlled(partial(_launched, work, options, typed), options.plain)
    return _launched(work, options, typed, shown_here(options.plain))


def _planned(work: Work, options: SshOptions, typed: tuple[str, ...]) -> int:
    with prepared(work, options, typed) as spec:
        say_what_is_made(work, spec.work)
        pending_checks = pending(spec.work, options, is_to_make(work, spec.work))
        with served(spec.work, options.serving, spec.addresses) as served_work:
            spec = replace(spec, work=served_work)
            if options.check:
                return _check(spec, pending_checks, options)
            code, _ = planned_code(spec, options)  # raises UsageError as --sync would
            planned = replace(spec.settings, pending=pending_checks)
            return show_plan(replace(spec, settings=planned, code=code), options.json)


def _launched(work: Work, options: SshOptions, typed: tuple[str, ...], show: Show) -> int:
    with prepared(work, options, typed) as spec:
        try:
            make(work, spec.work)
        except NotMade as problem:  # the lines above say why
            return problem.exit_code
        with served(spec.work, options.serving, spec.addresses) as served_work:
            spec = with_code(replace(spec, work=served_work), options)
            return attached(spec, options, show).exit_code


def refuse_ineffective_wait(work: Work, options: SshOptions) -> None:
    """Raise UsageError for seconds to wait for a task, whose steps are waited for."""
    condition = Condition(
        ("detach_seconds",),
        lambda _: isinstance(work, Command),
        "a task is waited for until the first step of every rank",
    )
    refuse_without_effect(options, changed_settings(options), [condition])


def launch_attached(work: Work, options: SshOptions) -> Result:
    """Launch in the foreground, and return the result."""
    if options.detach:
        raise UsageError("detach: launch() returns at the end of the run; leave it out")
    with prepared(work, options) as spec:
        make(work, spec.work)
        with served(spec.work, options.serving, spec.addresses) as served_work:
            spec = with_code(replace(spec, work=served_work), options)
            return attached(spec, options, shown_here(options.plain))


def is_forwarded(environment: Mapping[str, str]) -> bool:
    """Return True where the SSH agent is the one of another machine, which this login brings."""
    socket = environment.get("SSH_AUTH_SOCK", "")
    is_of_sshd = bool(re.match(r"/tmp/ssh-\w+/agent\.", socket)) or ".sshd." in socket
    return is_of_sshd and "SSH_CONNECTION" in environment and "SSH_AGENT_PID" not in environment


OF_LIBRARIES = ("NCCL_", "GLOO_", "HF_")


def not_passed_on(environment: Mapping[str, str], passed: Collection[str]) -> list[str]:
    """Return the variables of libraries that are set here and that ranks elsewhere do not get."""
    return sorted(
        name for name in environment if name.startswith(OF_LIBRARIES) and name not in passed
    )


@contextmanager
def prepared(work: Work, options: SshOptions, typed: tuple[str, ...] = ()) -> Iterator[LaunchSpec]:
    """Yield the launch on the hosts that the options name; the task's options are checked.

    Only with --check, some of them may not be reached.
    """
    settings = resolved(options, job_template("ssh", options, work, typed), options.sync)
    work = with_shards(work)
    with (
        connected(options, settings.restarts) as (hosts, network),
        check_task_options(work, "ssh", str(options.hosts)) as refuse,
    ):
        if options.check:
            outcomes = network.try_each(hosts)
            reachable = addresses(hosts, outcomes)
            spec = LaunchSpec(hosts, outcomes, work, settings, addresses=reachable)
        else:
            spec = chosen(hosts, network, work, settings, options)
        spec = spec.with_needs(refuse_shared(work, refuse()))
        if kept := not_passed_on(os.environ, {name for name, _ in settings.needs.environment}):
            hint = f"type --env {kept[0]}, or --secret for a token"
            say(f"set here but not on the hosts: {first_few(kept, 3)}; to pass one on, {hint}")
        yield spec


def _check(spec: LaunchSpec, pending_checks: dict[str, str], options: SshOptions) -> int:
    code = code_here(options.runs, excluded=[options.hosts])
    planned = replace(spec.settings, pending=pending_checks)
    exit_code = check(replace(spec, settings=planned, code=code), options.json)
    if exit_code or not options.deep:
        return exit_code
    return attached(deep_check(spec, options), options, shown_here(options.plain)).exit_code


def attached(spec: LaunchSpec, options: SshOptions, show: Show) -> Result:
    """Run attempts to the end, in a folder that has the hosts for `status` and `stop`."""
    jobs = replace(spec.settings.jobs, hosts=hosts_text(spec.hosts, options.ssh_config))
    return Launch(replace(spec, settings=replace(spec.settings, jobs=jobs)), show).run()
