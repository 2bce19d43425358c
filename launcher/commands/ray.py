"""`./run-ray`: torchrun on every node of a Ray cluster, by the same checks, agents and supervision.

Ray only provides the nodes; it starts no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rackrun.commandline.help_page import Head
from rackrun.launcher.commands.launch import LaunchMethod
from rackrun.launcher.commands.parse import from_names, kept_settings, read
from rackrun.launcher.commands.work import work_of
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.planning import code_here
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
    spec, on_ray = spec_of(work, options, line.again(work)), launch_method(options)
    with line.naming_the_file():
        return on_ray.show(spec) if options.dry_run else on_ray.start(spec)


def launch(args: Sequence[str], options: Mapping[str, object]) -> Result:
    """Launch from Python: the arguments after the options, and the options by name."""
    chosen = from_names(RayOptions, options)
    spec = spec_of(work_of(args) or DEFAULT, chosen)
    return launch_method(chosen).run(spec, shown_here(chosen.plain))


def spec_of(work: Work, options: RayOptions, typed: tuple[str, ...] = ()) -> LaunchSpec:
    """Return the launch, whose hosts are not known yet."""
    return LaunchSpec(work, options, typed, kept_settings("ray", options, work, typed))


def launch_method(options: RayOptions) -> LaunchMethod:
    """Return the method of launching on a cluster's nodes, which have the code of this folder."""

    @contextmanager
    def nodes(spec: LaunchSpec) -> Iterator[LaunchSpec]:
        with cluster(options.address) as (hosts, transports):
            addresses = [host.name for host in hosts]
            yield replace(spec, hosts=hosts, transports=transports, addresses=addresses)

    def with_code(spec: LaunchSpec) -> LaunchSpec:
        return replace(spec, code=code_here(options.runs))

    return LaunchMethod(("ray",), nodes, with_code, with_code)
