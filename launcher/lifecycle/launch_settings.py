"""Settings that all attempts of a launch share, resolved from the options once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.lifecycle.restart_policy import RestartPolicy
from launcher.preflight.checks import check_allowed
from launcher.preflight.facts import Requirements
from launcher.remote.locks import POLITE
from launcher.run.container import container_of
from launcher.run.job import JobTemplate
from launcher.run.settings import HostOptions
from rackrun.contract.task_needs import TaskNeeds


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
    polite: bool = False
    """Give way to launches that wait."""

    def queued_now(self) -> LaunchSettings:
        """Return the same settings for a launch that gave way: it waits, after all others."""
        return replace(self, wait=True, needs=replace(self.needs, turn=_turn(self.polite)))

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
        workdir=options.workdir or str(Path.cwd()),
        python=options.python,
        environment=(*jobs.environment, *jobs.secrets),
        port=options.port,
        turn=_turn(options.polite),
        image=container_of(options.image, options.volume),
        synced=synced,
    )
    min_hosts = options.min_hosts or int(options.elastic)
    restarts = RestartPolicy(options.max_restarts, options.spares, min_hosts)
    return LaunchSettings(
        jobs,
        needs,
        restarts,
        options.ignore_check,
        plain=options.plain,
        wait=options.wait,
        polite=options.polite,
    )


def _turn(is_polite: bool) -> str:
    """Return a turn in the queue, as text to sort, after all that were given before."""
    return f"{time.time():.6f}-{secrets.token_hex(4)}{POLITE if is_polite else ''}"
