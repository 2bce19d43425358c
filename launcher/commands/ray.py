"""`./run-ray`: torchrun on every node of a Ray cluster, by the same survey, agents and supervision.

Ray only lends the nodes: it starts no rank itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.commands.parse import parse, read_work, recorded, split, takes_settings_file, typed
from launcher.commands.resolve import resolved
from launcher.commands.show import show_plan
from launcher.lifecycle.attempts import Launch, run_to_end
from launcher.lifecycle.planning import code_here
from launcher.lifecycle.serving import served
from launcher.lifecycle.task_check import check_task_options
from launcher.run.job import TaskWork
from launcher.run.settings import HostOptions
from launcher.transport.ray import cluster

DEFAULT = TaskWork("catdog", ("--data", "data/shards"))


@dataclass(frozen=True)
class RayOptions(HostOptions):
    """Options of `./run-ray`."""

    address: str = "auto"
    """The cluster's address, HOST:PORT; auto: the one that this machine belongs to."""


@takes_settings_file(RayOptions)
def main(args: Sequence[str]) -> int:
    """Run what the command line says, and return the exit code."""
    own, rest = split(args, RayOptions)
    options = parse(RayOptions, "ray", own, description())
    work = read_work("ray", RayOptions, own, rest) or DEFAULT
    settings = resolved(options, recorded("ray", options, work, typed("ray", own, work)))
    with (
        cluster(options.address) as (hosts, places),
        check_task_options(work, "ray") as refuse,
    ):
        refuse()
        addresses = [host.name for host in hosts]
        with served(work, options.serving, addresses) as there:
            if options.dry_run:
                return show_plan(hosts, places, there, settings, options.json)
            code = code_here(settings.jobs.runs)
            return run_to_end(Launch(hosts, places, there, settings, code)).exit_code


def description() -> str:
    """Return the head of the help."""
    return (
        "{prog} [options] [TASK [task options] | -- COMMAND]: torchrun on every node of a Ray"
        " cluster.\nTasks: {tasks}. Without a task: trains catdog on data/shards."
    )
