"""From the options of a launch on hosts to plain values, once, before a host is asked."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from launcher.lifecycle.launch_settings import LaunchSettings
from launcher.lifecycle.restart_policy import RestartPolicy
from launcher.preflight.checks import check_allowed
from launcher.preflight.facts import Requirements
from launcher.run.container import container_of
from launcher.run.job import JobTemplate
from launcher.run.settings import HostOptions


def resolved(options: HostOptions, jobs: JobTemplate | None = None) -> LaunchSettings:
    """Return what the options ask for; raise UsageError for what cannot be meant."""
    check_allowed(options.ignore_check)
    jobs = jobs or options.jobs
    needs = Requirements(
        workdir=options.workdir or str(Path.cwd()),
        python=options.python,
        environment=(*jobs.environment, *jobs.secrets),
        port=options.port,
        place=f"{time.time():.6f}-{secrets.token_hex(4)}",
        image=container_of(options.image, options.volume),
    )
    restarts = RestartPolicy(options.max_restarts, options.spares, options.min_hosts)
    return LaunchSettings(
        jobs, needs, restarts, options.ignore_check, plain=options.plain, wait=options.wait
    )
