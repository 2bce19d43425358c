"""Settings that all attempts of a launch share, resolved from the options once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from launcher.files.working_tree import WorkingTree
from launcher.lifecycle.restart_policy import RestartPolicy
from launcher.preflight.facts import Requirements
from launcher.run.job import JobTemplate, Work, data_of, is_on_cpu


@dataclass(frozen=True)
class LaunchSettings:
    """The options of a launch on hosts, as plain values."""

    jobs: JobTemplate
    needs: Requirements
    """What hosts must offer, but for code and data, which `requirements` adds."""
    restarts: RestartPolicy = RestartPolicy()
    ignored_checks: tuple[str, ...] = ()
    pending: Mapping[str, str] = field(default_factory=dict)
    """Checks that hosts need not pass yet, and what the launch will do about them."""
    plain: bool = False
    """Plain lines instead of the dashboard."""
    wait: bool = False
    """Wait for hosts that other runs use."""

    def requirements(
        self, work: Work, code: WorkingTree | None, full: bool = False
    ) -> Requirements:
        """Return what the hosts are asked about for this work."""
        return replace(
            self.needs,
            code=code if code and code.files else None,
            data=data_of(work),
            full=full,
            waits=self.wait and not full,
            on_cpu=is_on_cpu(work),
        )
