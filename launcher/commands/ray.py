"""`./run-ray`: torchrun on every node of a Ray cluster, by the same checks, agents and supervision.

Ray only provides the nodes; it starts no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

from rackrun.commandline.help_page import Head
from rackrun.commandline.options import Values
from rackrun.launcher.commands.launch import LaunchMethod
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.planning import code_here
from rackrun.launcher.run.job import TaskWork
from rackrun.launcher.run.settings import HostOptions
from rackrun.launcher.transport.ray import cluster


@dataclass(frozen=True)
class RayOptions(HostOptions):
    """Ray cluster."""

    address: Annotated[str, Values("ADDRESS")] = "auto"
    """Address of the cluster, HOST:PORT; auto: the cluster of this machine."""


class RayLaunch(LaunchMethod):
    """A launch on a cluster's nodes, which have the code of this folder."""

    name = "ray"
    settings = RayOptions
    default_work = TaskWork("catdog", ("--data", "data/shards"))
    head = Head(
        "{prog} [options] [TASK [task options] | -- COMMAND]",
        "Run a task or a command on the nodes of a Ray cluster, with torchrun on each. Without"
        " either, train catdog on data/shards.",
        (
            ("{prog} catdog --data data/shards", "a task, on every node"),
            ("{prog} --address head:6379 -- python train.py", "any script, on another cluster"),
        ),
        "{prog} TASK --help shows the options of a task.",
    )

    @contextmanager
    def on_hosts(self, spec: LaunchSpec) -> Iterator[LaunchSpec]:
        """Yield the launch on the nodes of the cluster."""
        with cluster(self.options.address) as (hosts, transports):
            addresses = [host.name for host in hosts]
            yield replace(spec, hosts=hosts, transports=transports, addresses=addresses)

    def bring_code(self, spec: LaunchSpec) -> LaunchSpec:
        """Return the launch with the code that hosts must have already."""
        return replace(spec, code=code_here(self.options.runs))

    plan_code = bring_code


main = RayLaunch.main
