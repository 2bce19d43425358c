"""`./run-ssh --detach`: start a run that continues without this machine, and print its ID."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from launcher.commands.settings import SshOptions
from launcher.detached.entries import result_of
from launcher.detached.locate import run_manager_on
from launcher.detached.replies import LiveRun, RunFacts, call
from launcher.detached.start import detached
from launcher.errors import HostError, HostLost
from launcher.lifecycle.launch_spec import LaunchSpec
from launcher.lifecycle.serving import folder_to_serve
from launcher.output.console import last_line, say
from launcher.run.hosts import Host
from launcher.run.job import Command
from launcher.transport.base import Transport
from rackrun.commandline.conditions import Condition, changed_settings, refuse_without_effect
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.signals import ended_by_a_signal
from rackrun.terminal import clean_lines

_POLL_SECONDS = 0.5
_NOT_RUNNING = ("connecting", "starting", "stopping", "lost", "failed")


def start_detached(spec: LaunchSpec, options: SshOptions) -> int:
    """Start the run, print its ID, and return 0 once every rank has taken its first step.

    If the run ends before that, return its exit code. Ctrl-C only ends the wait.
    """
    with detached(spec, options.ssh_config) as run:
        sys.stdout.write(f"{run}\n")
        sys.stdout.flush()
        seconds = options.detach_seconds if isinstance(spec.work, Command) else None
        return 0 if seconds == 0 else _wait(run, spec.hosts[0], spec.reached[0], seconds)


def _wait(run: str, host: Host, transport: Transport, seconds: float | None) -> int:
    """Wait until the run has begun; return 0, or the exit code of a run that ended before."""
    what = "the first step of every rank" if seconds is None else f"{seconds:g} s of every rank"
    say(f"waiting for {what}; Ctrl-C leaves the run running")
    come_back = f"to see it: {called('attach')} {run}; to end it: {called('stop')} {run}"
    try:
        with ended_by_a_signal():
            reply = _wait_for_first_step(run, host, transport, seconds)
    except KeyboardInterrupt:
        say(f"not waited for, the run continues; {come_back}")
        return 128 + signal.SIGINT
    except HostError as error:
        raise type(error)(f"{error}; {come_back}") from None
    if reply.end is None:
        say(f"detached; {come_back}")
        return 0
    say(f"run {run} has ended: {_ending(reply)}")
    say(f"its output: {called('logs')} {run}")
    return reply.end


def _wait_for_first_step(
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


def _ending(reply: RunFacts) -> str:
    """Return how a run has ended, as its first host reports it; its logs are there."""
    if reply.error or reply.finish is None:
        return clean_lines(reply.error)
    result = result_of(reply.finish, Path(reply.finish.folder))
    return last_line(replace(result, log=None))


def _is_past(since: float | None, seconds: float | None) -> bool:
    return since is not None and seconds is not None and time.monotonic() - since >= seconds


def _all_running(run: LiveRun) -> bool:
    return bool(run.hosts) and all(host.state not in _NOT_RUNNING for host in run.hosts)


def refuse_what_stays(spec: LaunchSpec, options: SshOptions) -> None:
    """Raise UsageError for what needs this launcher, which ends after the start."""
    condition = Condition(
        ("detach_seconds",),
        lambda _: isinstance(spec.work, Command),
        "a task is waited for until the first step of every rank",
    )
    refuse_without_effect(options, changed_settings(options), [condition])
    if options.scaling:
        raise UsageError("--scaling starts several runs, and shows them; leave out --detach")
    if folder_to_serve(spec.work, options.serving, spec.addresses) is not None:
        raise UsageError(
            "--detach: this launcher would serve the shards, and it does not stay;"
            f" serve them yourself ({called('serve')} --help) and give --data http://...,"
            " or type --no-serve when every host has the folder"
        )
