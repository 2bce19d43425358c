"""A launch on hosts over SSH: connect, check them, upload code, serve data, and run there."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from rackrun.commandline.conditions import Condition, changed_settings, refuse_without_effect
from rackrun.errors import UsageError
from rackrun.launcher.commands.launch import LaunchMethod
from rackrun.launcher.commands.parse import CommandLine, kept_settings
from rackrun.launcher.commands.reach import on_hosts
from rackrun.launcher.commands.settings import SshOptions
from rackrun.launcher.commands.show import check, deep_check
from rackrun.launcher.commands.upload import with_code, with_planned_code
from rackrun.launcher.lifecycle.attempts import Launch
from rackrun.launcher.lifecycle.data_preparation import demo_for_hosts
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.starter import controlled, is_bound
from rackrun.launcher.output.console import say
from rackrun.launcher.output.screen import shown_here
from rackrun.launcher.run.job import Command, Work
from rackrun.launcher.run.kept_hosts import hosts_text
from rackrun.launcher.run.result import Result
from rackrun.units import first_few


def start(line: CommandLine[SshOptions]) -> int:
    """Check, plan or launch as the command line demands; return the exit code."""
    options, work = line.options, line.work
    if work is None:
        # --check without a task asks hosts about no data.
        work = Command(()) if options.check else demo_for_hosts()
    spec, over_ssh = spec_of(work, options, line.again(work)), launch_method(options)
    if options.check:
        with over_ssh.planned(spec) as planned:
            return _check(planned, options)
    if options.detach:
        refuse_ineffective_wait(work, options)
    if options.dry_run:
        return over_ssh.show(spec)
    if not options.detach:
        return over_ssh.start(spec)
    if is_bound(os.environ):
        raise UsageError("--detach: process 1 and Slurm steps end with their run; leave it out")
    if is_forwarded(os.environ):
        say(
            "warning: your keys are those of a forwarded agent, which ends with this login:"
            " a restart after that could not log in to the hosts"
        )
    seconds = options.detach_seconds if isinstance(work, Command) else None
    return controlled(partial(over_ssh.exit_code, spec), options.plain, True, seconds)


def run(work: Work | None, options: SshOptions) -> Result:
    """Launch in the foreground, the demo if there is no work, and return the result."""
    return launch_method(options).run(
        spec_of(work or demo_for_hosts(), options), shown_here(options.plain)
    )


def spec_of(work: Work, options: SshOptions, typed: tuple[str, ...] = ()) -> LaunchSpec:
    """Return the launch, whose hosts and code are not known yet."""
    settings = kept_settings("ssh", options, work, typed)
    return LaunchSpec(work, options, typed, settings, synced=options.sync)


def launch_method(options: SshOptions) -> LaunchMethod:
    """Return the method of launching on the hosts that the options name."""
    return LaunchMethod(
        ("ssh", str(options.hosts)),
        partial(_hosts, options=options),
        partial(_with_code, options=options),
        partial(with_planned_code, options=options),
    )


@contextmanager
def _hosts(spec: LaunchSpec, options: SshOptions) -> Iterator[LaunchSpec]:
    with on_hosts(spec, options) as reached:
        passed = {name for name, _ in spec.requirements().environment}
        if kept := not_passed_on(os.environ, passed):
            hint = f"type --env {kept[0]}, or --secret for a token"
            say(f"set here but not on the hosts: {first_few(kept, 3)}; to pass one on, {hint}")
        yield reached


def _with_code(spec: LaunchSpec, options: SshOptions) -> LaunchSpec:
    """Bring the code to the hosts, which `status` and `stop` find in the run folder."""
    hosts_file = hosts_text(spec.hosts, options.ssh_config)
    return with_code(replace(spec, hosts_file=hosts_file), options)


def refuse_ineffective_wait(work: Work, options: SshOptions) -> None:
    """Raise UsageError for seconds to wait for a task, whose steps are waited for."""
    condition = Condition(
        ("detach_seconds",),
        lambda _: isinstance(work, Command),
        "a task is waited for until the first step of every rank",
    )
    refuse_without_effect(options, changed_settings(options), [condition])


def is_forwarded(environment: Mapping[str, str]) -> bool:
    """Return True where the SSH agent is the one of another machine, which this login brings."""
    socket = environment.get("SSH_AUTH_SOCK", "")
    is_of_sshd = bool(re.match(r"/tmp/ssh-\w+/agent\.", socket)) or ".sshd." in socket
    return is_of_sshd and "SSH_CONNECTION" in environment and "SSH_AGENT_PID" not in environment


OF_LIBRARIES = ("CUDA_VISIBLE_DEVICES", "GLOO_", "HF_", "MLFLOW_", "NCCL_", "TORCH_", "WANDB_")


def not_passed_on(environment: Mapping[str, str], passed: Collection[str]) -> list[str]:
    """Return the variables of libraries that are set here and that ranks elsewhere do not get."""
    return sorted(
        name for name in environment if name.startswith(OF_LIBRARIES) and name not in passed
    )


def _check(spec: LaunchSpec, options: SshOptions) -> int:
    exit_code = check(spec, options.json)
    if exit_code or not options.deep:
        return exit_code
    measured = _with_code(replace(deep_check(spec), pending={}), options)
    return Launch(measured, shown_here(options.plain)).run().exit_code
