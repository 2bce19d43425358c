"""`./run-ray`: torchrun on every node of a Ray cluster, by the same checks, agents and supervision.

Ray only provides the nodes; it starts no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rackrun.commandline.help_page import Head
from rackrun.launcher.commands.parse import from_names, job_template, read, refuse_shared
from rackrun.launcher.commands.show import show_plan
from rackrun.launcher.commands.work import work_of
from rackrun.launcher.lifecycle.attempts import Launch
from rackrun.launcher.lifecycle.launch_spec import LaunchSettings, LaunchSpec, resolved
from rackrun.launcher.lifecycle.planning import code_here
from rackrun.launcher.lifecycle.serving import served
from rackrun.launcher.lifecycle.task_check import check_task_options
from rackrun.launcher.output.screen import shown_here
from rackrun.launcher.run.job import TaskWork, Work
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.settings import HostOptions
from rackrun.launcher.settings_file import SettingsFile
from rackrun.launcher.transport.ray import cluster

DEFAULT = TaskWork("catdog", ("--data", "data/shards"))


@dataclass(frozen=True)
class RayOptions(HostOptions):
    """Ray cluster."""

    address: str = "auto"
    """Address of the cluster, HOST:PORT; auto: the cluster of this machine."""


HEAD = Head(
    "{prog} [options] [TASK [task options] | -- COMMAND]",
    "Train on the nodes of a Ray cluster, with torchrun on each. Without a task, train catdog on"
    " data/shards.",
    (
        ("{prog} catdog --data data/shards", "a task, on every node"),
        ("{prog} --address head:6379 -- python train.py", "any script, on another cluster"),
    ),
    "{prog} TASK --help shows the options of a task.",
)
"""The head of the help."""


OPTIONS = RayOptions


def main(args: Sequence[str], again: SettingsFile | None = None) -> int:
    """Run the command line, or a run `again`; return the exit code."""
    line = read("ray", RayOptions, HEAD, args, again)
    options, work = line.options, line.work or DEFAULT
    settings = resolved(options, job_template("ray", options, work, line.again(work)))
    with line.naming_the_file(), prepared(work, options, settings) as spec:
        if options.dry_run:
            return show_plan(spec, options.json)
        return Launch(spec, shown_here(options.plain)).run().exit_code


def launch(args: Sequence[str], options: Mapping[str, object]) -> Result:
    """Launch from Python: the arguments after the options, and the options by name."""
    work, chosen = work_of(args) or DEFAULT, from_names(RayOptions, options)
    with prepared(work, chosen, resolved(chosen, job_template("ray", chosen, work))) as spec:
        return Launch(spec, shown_here(chosen.plain)).run()


@contextmanager
def prepared(work: Work, options: RayOptions, settings: LaunchSettings) -> Iterator[LaunchSpec]:
    """Reserve the nodes, check the options of a task, and serve its data; yield the launch."""
    with (
        cluster(options.address) as (hosts, transports),
        check_task_options(work, "ray") as refuse,
    ):
        needs = refuse_shared(work, refuse())
        addresses = [host.name for host in hosts]
        with served(work, options.serving, addresses) as served_work:
            code = code_here(settings.jobs.runs)
            yield LaunchSpec(hosts, transports, served_work, settings, code).with_needs(needs)
