"""The wait of `--detach`: until every rank has taken its first step, or the run has ended."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from launcher.detached.entries import result_of
from launcher.detached.locate import run_manager_on
from launcher.detached.replies import LiveRun, RunFacts, call
from launcher.errors import HostLost
from launcher.output.console import last_line
from launcher.run.hosts import Host
from launcher.transport.base import Transport
from rackrun.terminal import clean_lines

_POLL_SECONDS = 0.5
_NOT_RUNNING = ("connecting", "starting", "stopping", "lost", "failed")


def wait_for_first_step(
    run: str, host: Host, transport: Transport, seconds: float | None
) -> RunFacts:
    """Return the first host's reply once every rank has taken a step, or the run has ended.

    Ranks that report no steps have to run for this many seconds; None: every rank reports them.
    """
    running_since: float | None = None
    with run_manager_on(transport, host.python) as client:
        while True:
            reply = call(host.label, client, RunFacts, "find", run=run)
            if reply.end is not None:
                return reply
            if not reply.alive:
                raise HostLost(f"{host.label}: the controller of run {run} has died")
            if not _all_running(reply.live):
                running_since = None
            elif running_since is None:
                running_since = time.monotonic()
            if reply.step or _is_past(running_since, seconds):
                return reply
            time.sleep(_POLL_SECONDS)


def ending(reply: RunFacts) -> str:
    """Return how a run has ended, as its first host reports it; its logs are there."""
    if reply.error or reply.finish is None:
        return clean_lines(reply.error)
    result = result_of(reply.finish, Path(reply.finish.folder))
    return last_line(replace(result, log=None))


def _is_past(since: float | None, seconds: float | None) -> bool:
    return since is not None and seconds is not None and time.monotonic() - since >= seconds


def _all_running(run: LiveRun) -> bool:
    return bool(run.hosts) and all(host.state not in _NOT_RUNNING for host in run.hosts)
