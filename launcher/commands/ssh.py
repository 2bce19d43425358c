"""`./run-ssh`: connect to hosts over SSH, check them, upload code, serve data, and run there."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rackrun.errors import UsageError
from rackrun.launcher.commands.launch import LaunchMethod
from rackrun.launcher.commands.reach import listed_hosts, on_hosts
from rackrun.launcher.commands.settings import CHECK_HEAD, SSH_HEAD, DetachOptions, SshOptions
from rackrun.launcher.commands.show import check, deep_check
from rackrun.launcher.commands.upload import bring_code, plan_code
from rackrun.launcher.lifecycle.attempts import Attempts
from rackrun.launcher.lifecycle.data_preparation import demo_for_hosts
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.starter import ends_with_starter, run_in_controller
from rackrun.launcher.output.console import say
from rackrun.launcher.output.run_printer import printed_here
from rackrun.launcher.run.job import Command, Work
from rackrun.launcher.run.kept_hosts import hosts_text
from rackrun.launcher.run.result import Result
from rackrun.launcher.settings_file import SettingsFile
from rackrun.units import first_few


class SshLaunch(LaunchMethod):
    """A launch on the hosts that the options name."""

    name = "ssh"
    settings = SshOptions
    head = SSH_HEAD

    @property
    def default_work(self) -> Work:
        """The demo; --check without a task asks hosts about no data."""
        return Command(()) if self.options.check else demo_for_hosts()

    @property
    def words_before_task(self) -> tuple[str, ...]:
        """The command, and the host file."""
        return ("ssh", str(self.options.hosts))

    @property
    def sweep_groups(self) -> Sequence[str]:
        """The groups of hosts on which runs of a sweep are side by side."""
        from rackrun.launcher.search.sweep import groups_of  # with numpy

        return groups_of(listed_hosts(self.options), self.options.sweep_hosts)

    def spec_of(self, work: Work) -> LaunchSpec:
        """Return the launch, whose hosts and code are not known yet."""
        return replace(super().spec_of(work), synced=self.options.sync)

    @classmethod
    def launch(cls, args: Sequence[str], values: Mapping[str, object]) -> Result:
        """Launch from Python; hosts may be a list of names, too."""
        hosts = values.get("hosts")
        if isinstance(hosts, list | tuple):
            others = {name: value for name, value in values.items() if name != "hosts"}
            values = {**others, "host_list": ",".join(map(str, hosts))}
        return super().launch(args, values)

    def carry_out(self, work: Work | None) -> int:
        """Check, plan or launch as the options demand; return the exit code."""
        options, spec = self.options, self.spec_of(work or self.default_work)
        if options.check:
            with self.planned(spec) as planned:
                return self._check(planned)
        is_timed = options.detach_seconds != DetachOptions.detach_seconds
        if options.detach and is_timed and not isinstance(spec.work, Command):
            raise UsageError(
                f"--detach-seconds {options.detach_seconds:g} has no effect: a task is waited for"
                " until the first step of every rank; leave it out"
            )
        if options.dry_run or not options.detach:
            return super().carry_out(work)
        if ends_with_starter(os.environ):
            raise UsageError("--detach: process 1 and Slurm steps end with their run; leave it out")
        if is_forwarded(os.environ):
            say(
                "warning: your keys are those of a forwarded agent, which ends with this login:"
                " a restart after that could not log in to the hosts"
            )
        if ends_at_logout():
            say(
                "warning: logind ends the run at logout (KillUserProcesses); to prevent that, type:"
                " loginctl enable-linger"
            )
        seconds = options.detach_seconds if isinstance(spec.work, Command) else None
        return run_in_controller(
            partial(self.run_for_exit_code, spec), options.plain, True, seconds
        )

    @contextmanager
    def on_hosts(self, spec: LaunchSpec) -> Iterator[LaunchSpec]:
        """Yield the launch on the hosts, reached over SSH."""
        with on_hosts(spec, self.options, partial(bring_code, options=self.options)) as reached:
            passed = {name for name, _ in spec.environment}
            if kept := not_passed_on(os.environ, passed):
                hint = f"type --env {kept[0]}, or --secret for a token"
                say(f"set here but not on the hosts: {first_few(kept, 3)}; to pass one on, {hint}")
            yield reached

    def bring_code(self, spec: LaunchSpec) -> LaunchSpec:
        """Bring the code to the hosts; note the hosts for `stop`, which reads the run folder."""
        hosts_file = hosts_text(spec.hosts, self.options.ssh_config)
        return bring_code(replace(spec, hosts_file=hosts_file), self.options)

    def plan_code(self, spec: LaunchSpec) -> LaunchSpec:
        """Return the launch with the code that hosts would have."""
        return plan_code(spec, self.options)

    def _check(self, spec: LaunchSpec) -> int:
        exit_code = check(spec, self.options.json)
        if exit_code or not self.options.deep:
            return exit_code
        measured = self.bring_code(replace(deep_check(spec), pending={}))
        return Attempts(measured, printed_here(self.options.plain)).run().exit_code


class CheckLaunch(SshLaunch):
    """`check`, or --check, whose help has a head of its own."""

    head = CHECK_HEAD


def main(args: Sequence[str], again: SettingsFile | None = None) -> int:
    """Run the command line, or a run `again`; return the exit code."""
    return (CheckLaunch if "--check" in args else SshLaunch).main(args, again)


def is_forwarded(environment: Mapping[str, str]) -> bool:
    """Return True where the SSH agent is the one of another machine, which this login brings."""
    socket = environment.get("SSH_AUTH_SOCK", "")
    is_of_sshd = bool(re.match(r"/tmp/ssh-\w+/agent\.", socket)) or ".sshd." in socket
    return is_of_sshd and "SSH_CONNECTION" in environment and "SSH_AGENT_PID" not in environment


def ends_at_logout(settings: Path = Path("/etc/systemd")) -> bool:
    """Return True where logind ends what a login has started, and this account does not linger."""
    files = [settings / "logind.conf", *sorted(settings.glob("logind.conf.d/*.conf"))]
    text = "\n".join(file.read_text() for file in files if file.is_file())
    last = re.findall(r"^KillUserProcesses=(\w+)", text, re.MULTILINE)[-1:]
    return last == ["yes"] and not Path("/var/lib/systemd/linger", getpass.getuser()).exists()


OF_LIBRARIES = ("CUDA_VISIBLE_DEVICES", "GLOO_", "HF_", "MLFLOW_", "NCCL_", "TORCH_", "WANDB_")


def not_passed_on(environment: Mapping[str, str], passed: Collection[str]) -> list[str]:
    """Return the variables of libraries that are set here and that ranks elsewhere do not get."""
    return sorted(
        name for name in environment if name.startswith(OF_LIBRARIES) and name not in passed
    )
