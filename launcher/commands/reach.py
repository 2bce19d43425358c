"""The hosts that the options of `./run-ssh` name, reached over SSH."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands.ssh_settings import SshOptions
from launcher.lifecycle.restart_policy import RestartPolicy, RestartState
from launcher.run.hosts import Host, read_hosts, select
from launcher.schedulers.slurm import allocated
from rackrun.errors import Problem

if TYPE_CHECKING:
    from launcher.transport.ssh import Machine, Network


@contextmanager
def connected(
    options: SshOptions, restarts: RestartPolicy
) -> Iterator[tuple[tuple[Host, ...], Network]]:
    """Yield the hosts that the options name and a network to reach them; close it afterwards."""
    hosts = allocated(os.environ) if options.slurm else read_hosts(Path(options.hosts))
    hosts = select(hosts, options.include, options.exclude)
    RestartState(restarts, hosts)  # refuses spares that do not fit before a host is asked
    from launcher.transport.ssh import (  # Fabric takes as long to import as --help may
        ConnectSettings,
        Network,
    )

    config = Path(options.ssh_config) if options.ssh_config else None
    network = Network(ConnectSettings(config=config, accept_new=options.accept_new))
    try:
        yield hosts, network
    finally:
        network.close()


def addresses(hosts: Sequence[Host], places: Sequence[Machine | Problem]) -> list[str]:
    """Return the data address of each host that answers; empty for one behind a gateway."""
    return [
        host.address or place.address
        for host, place in zip(hosts, places, strict=True)
        if not isinstance(place, Problem)
    ]
