"""A launch on hosts before its first attempt: what is to run, where, and under which settings.

options -> LaunchSettings, once, for all attempts -> LaunchSpec, with hosts, work and code
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rackrun.contract.task_needs import TaskNeeds
from rackrun.errors import Problem, UsageError
from rackrun.launcher.files.working_tree import WorkingTree
from rackrun.launcher.lifecycle.restart_policy import RestartPolicy, RestartState
from rackrun.launcher.preflight.checks import check_allowed
from rackrun.launcher.preflight.facts import NO_FACTS, ClusterFacts, Requirements
from rackrun.launcher.run.container import container_of
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.job import (
    FunctionCall,
    JobTemplate,
    TaskWork,
    Work,
    data_of,
    is_on_cpu,
    is_own_command,
)
from rackrun.launcher.run.settings import HostOptions
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.parallel import all_or_raise
from rackrun.machine import typed_folder

SYNCED_PACKAGES = ("click", "msgspec")
"""Those that every task needs and no torch brings."""


@dataclass(frozen=True)
class LaunchSpec:
    """All that a launch on hosts goes by."""

    hosts: Sequence[Host]
    transports: Sequence[Transport | Problem]
    """The ways to the hosts, in their order; for one that cannot be reached, the reason."""
    work: Work
    settings: LaunchSettings
    code: WorkingTree | None = None
    """What the code of hosts is compared with; None for a folder without git."""
    addresses: Sequence[str] = ()
    """The addresses at which this machine reaches hosts; "" for one behind a gateway."""
    probed: ClusterFacts = NO_FACTS
    """Facts whose probes hold the hosts, where there was a choice of hosts."""

    @property
    def reached(self) -> list[Transport]:
        """Return the transports; raise Problem where a host cannot be reached."""
        return all_or_raise(self.transports)

    @property
    def restart_state(self) -> RestartState:
        """Return which hosts are active at first; raise UsageError for spares that do not fit."""
        return RestartState(self.settings.restarts, tuple(self.hosts))

    def with_needs(self, task: TaskNeeds) -> LaunchSpec:
        """Return the same launch of a task that needs this of the hosts.

        Raise UsageError if a restart on as few of them as --min-hosts says could not continue it.
        """
        least = self.settings.restarts.min_hosts
        if task.keeps_ranks and 0 < least < len(self.restart_state.active()):
            raise UsageError(
                f"--min-hosts {least}: each rank adds --batch-size images to a step, so fewer ranks"
                " cannot continue the run; type --exact-epochs behind the task, or leave it out"
            )
        return replace(self, settings=self.settings.with_needs(task))

    def requirements(self, full: bool = False) -> Requirements:
        """Return what the hosts are asked about; `full`: as --check asks."""
        needs = self.settings.needs
        return replace(
            needs,
            task=replace(needs.task, packages=self._packages(needs.task)),
            code=self.code if self.code and self.code.files else None,
            data=data_of(self.work),
            full=full,
            waits=self.settings.wait and not full,
            own_command=is_own_command(self.work),
            on_cpu=is_on_cpu(self.work),
        )

    def _packages(self, task: TaskNeeds) -> tuple[str, ...]:
        """Return what the interpreter of the ranks must have, but for what --sync will bring."""
        if isinstance(self.work, FunctionCall):  # rackrun calls it on each rank
            return ("rackrun",)
        if not isinstance(self.work, TaskWork):
            return task.packages
        if "python" in self.settings.pending:
            return tuple(name for name in task.packages if name not in SYNCED_PACKAGES)
        return task.packages if self.settings.needs.synced else ("rackrun", *task.packages)


@dataclass(frozen=True)
class LaunchSettings:
    """The options of a launch on hosts, as plain values."""

    jobs: JobTemplate
    needs: Requirements
    """What hosts must offer, but for code and data, which a `LaunchSpec` has."""
    restarts: RestartPolicy = RestartPolicy()
    ignored_checks: tuple[str, ...] = ()
    pending: Mapping[str, str] = field(default_factory=dict)
    """Checks that hosts need not pass yet, and what the launch will do about them."""
    plain: bool = False
    """Plain lines instead of the dashboard."""
    wait: bool = False
    """Wait for hosts that other runs use."""

    def before_all(self) -> LaunchSettings:
        """Return the same settings for a restart, which comes before launches that wait."""
        return replace(self, needs=replace(self.needs, turn=""))

    def with_needs(self, task: TaskNeeds) -> LaunchSettings:
        """Return the same settings for a task that needs this of the hosts."""
        return replace(self, needs=replace(self.needs, task=task))


def resolved(
    options: HostOptions, jobs: JobTemplate | None = None, synced: bool = False
) -> LaunchSettings:
    """Return what the options ask for; raise UsageError for invalid usage."""
    check_allowed(options.ignore_check)
    jobs = jobs or options.jobs
    needs = Requirements(
        workdir=options.workdir or str(typed_folder()),
        python=options.python,
        environment=(*jobs.environment, *jobs.secrets),
        port=options.port,
        turn=_turn(),
        image=container_of(options.image, options.volume),
        synced=synced,
    )
    restarts = RestartPolicy(options.max_restarts, options.spares, options.min_hosts)
    return LaunchSettings(
        jobs,
        needs,
        restarts,
        options.ignore_check,
        plain=options.plain,
        wait=options.wait,
    )


def _turn() -> str:
    """Return a turn in the queue, as text to sort, after all that were given before."""
    return f"{time.time():.6f}-{secrets.token_hex(4)}"
