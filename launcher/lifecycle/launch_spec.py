"""A launch on hosts before its first attempt: what is to run, where, and under which settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.files.working_tree import WorkingTree
from launcher.lifecycle.launch_settings import LaunchSettings
from launcher.lifecycle.restart_policy import RestartState
from launcher.preflight.facts import NO_FACTS, ClusterFacts, Requirements
from launcher.run.hosts import Host
from launcher.run.job import Work, data_of, is_on_cpu
from launcher.transport.base import Transport
from launcher.transport.parallel import all_or_raise
from rackrun.contract.task_needs import TaskNeeds
from rackrun.errors import Problem


@dataclass(frozen=True)
class HostFile:
    """A host file that may get more lines, and what the launch does with their hosts."""

    path: Path
    listed: Sequence[Host]
    """The hosts that it named at the start, also those that the launch has left out."""
    read: Callable[[], Sequence[Host]]
    """Returns the hosts that it names now; raises UsageError that names all bad lines."""
    connect: Callable[[Sequence[Host]], Sequence[Transport | Problem]]
    """Logs in to hosts; returns for each the transport, or why it cannot be reached."""
    bring_code: Callable[[LaunchSpec, Callable[[str], object]], object]
    """Copies to the hosts of a launch what --sync copies, if that is asked for, and says so."""


@dataclass(frozen=True)
class LaunchSpec:
    """All that a launch on hosts goes by."""

    hosts: Sequence[Host]
    transports: Sequence[Transport | Problem]
    """To the hosts, in their order; to one that cannot be reached, the reason."""
    work: Work
    settings: LaunchSettings
    code: WorkingTree | None = None
    """What the code of hosts is compared with; None for a folder without git."""
    addresses: Sequence[str] = ()
    """By which this machine reaches hosts; empty text for one behind a gateway."""
    probed: ClusterFacts = NO_FACTS
    """With probes that hold the hosts, where there was a choice of hosts."""
    host_file: HostFile | None = None
    """Where an elastic run gets more hosts from while it goes on."""

    @property
    def reached(self) -> list[Transport]:
        """Return the transports; raise Problem where a host cannot be reached."""
        return all_or_raise(self.transports)

    @property
    def restart_state(self) -> RestartState:
        """Return which hosts are active at first; raise UsageError for spares that do not fit."""
        return RestartState(self.settings.restarts, tuple(self.hosts))

    def with_needs(self, task: TaskNeeds) -> LaunchSpec:
        """Return the same launch of a task that needs this of the hosts."""
        return replace(self, settings=self.settings.with_needs(task))

    def requirements(self, full: bool = False) -> Requirements:
        """Return what the hosts are asked about; `full`: as --check asks."""
        return replace(
            self.settings.needs,
            code=self.code if self.code and self.code.files else None,
            data=data_of(self.work),
            full=full,
            waits=self.settings.wait and not full,
            on_cpu=is_on_cpu(self.work),
        )
