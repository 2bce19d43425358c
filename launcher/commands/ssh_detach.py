"""`./run-ssh --detach`: start a run that continues without this machine, and print its ID."""

from __future__ import annotations

import signal
import sys

from launcher.commands.settings import SshOptions
from launcher.detached.first_step import ending, wait_for_first_step
from launcher.detached.start import detached
from launcher.errors import HostError
from launcher.lifecycle.interruptible import ended_by_a_signal
from launcher.lifecycle.launch_spec import LaunchSpec
from launcher.lifecycle.serving import folder_to_serve
from launcher.output.console import say
from launcher.run.hosts import Host
from launcher.run.job import Command
from launcher.transport.base import Transport
from rackrun.commandline.conditions import Condition, changed_settings, refuse_without_effect
from rackrun.commands import called
from rackrun.errors import UsageError


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
            reply = wait_for_first_step(run, host, transport, seconds)
    except KeyboardInterrupt:
        say(f"not waited for, the run continues; {come_back}")
        return 128 + signal.SIGINT
    except HostError as error:
        raise type(error)(f"{error}; {come_back}") from None
    if reply.end is None:
        say(f"detached; {come_back}")
        return 0
    say(f"run {run} has ended: {ending(reply)}")
    say(f"its output: {called('logs')} {run}")
    return reply.end


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
