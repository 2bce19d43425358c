"""The hosts that the options of `./run-ssh` name, reached over SSH."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands.settings import SshOptions
from launcher.errors import PreflightRefused
from launcher.lifecycle.launch_settings import LaunchSettings
from launcher.lifecycle.planning import gather_repeatedly, wait_for
from launcher.lifecycle.restart_policy import RestartPolicy, RestartState
from launcher.output.console import say
from launcher.preflight.checks import CHECKS, HISTORY, TableRow, examine, lines_of
from launcher.remote import probe
from launcher.run.hosts import Host, hosts_named, select
from launcher.run.job import Command
from launcher.schedulers.slurm import allocated
from launcher.supervision.agent_protocol import PROGRAM
from launcher.transport.bundle import pack_ahead
from rackrun.errors import Problem
from rackrun.units import plural

if TYPE_CHECKING:
    from launcher.transport.ssh import Machine, Network


def listed(options: SshOptions) -> tuple[Host, ...]:
    """Return the hosts that the options name."""
    named = Path(options.hosts), options.host_list
    hosts = allocated(os.environ) if options.slurm else hosts_named(*named)
    return select(hosts, options.include, options.exclude)


@contextmanager
def connected(
    options: SshOptions, restarts: RestartPolicy
) -> Iterator[tuple[tuple[Host, ...], Network]]:
    """Yield the hosts that the options name and a network to reach them; close it afterwards."""
    hosts = listed(options)
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


def chosen(
    hosts: tuple[Host, ...], network: Network, settings: LaunchSettings, options: SshOptions
) -> tuple[tuple[Host, ...], tuple[Machine, ...]]:
    """Return the hosts of the run and their transports: all, or the first that pass the checks."""
    pack_ahead((probe,), PROGRAM)
    if not options.hosts_needed:
        return hosts, network.connect(hosts)
    host_count = options.hosts_needed + options.spares
    busy_before = ""
    transports = network.try_each(hosts)
    # Code and data are checked before the start: they may be copied in between.
    needs = settings.requirements(Command(("true",)), None)
    with closing(gather_repeatedly(hosts, transports, needs)) as rounds:
        for cluster in rounds:
            rows = examine(cluster, CHECKS, settings.ignored_checks)
            fit = _fit_ones(hosts, transports, rows)
            if len(fit) >= host_count:
                break
            text = "\n".join(lines_of([row for row in rows if row.level == "refused"]))
            busy = {row.host for row in rows if row.is_busy}
            if not options.wait or len(fit) + len(busy) < host_count:
                need = f"{plural(host_count, 'host')} needed, {len(fit)} free and fit"
                raise PreflightRefused(f"{need}\n{text}")
            busy_before = wait_for(cluster, text, busy_before, say)
            lost = [facts.host for facts in cluster.hosts if facts.error is not None]
            again = dict(zip(lost, network.try_each(lost), strict=True))
            transports[:] = [
                again.get(host, transport)
                for host, transport in zip(hosts, transports, strict=True)
            ]
    chosen_hosts, chosen_transports = zip(*fit[:host_count], strict=True)
    return chosen_hosts, chosen_transports


def _fit_ones(
    hosts: Sequence[Host], transports: Sequence[Machine | Problem], rows: Sequence[TableRow]
) -> list[tuple[Host, Machine]]:
    """Return the hosts on which a run could start, and their transports.

    Those to which something has happened come last.
    """
    unfit = {row.host for row in rows if row.level == "refused"}
    doubtful = {row.host for row in rows if row.check == HISTORY and row.level == "warning"}
    pairs = zip(hosts, transports, strict=True)
    fit = [
        (host, transport)
        for host, transport in pairs
        if not isinstance(transport, Problem) and host.label not in unfit
    ]
    return sorted(fit, key=lambda pair: pair[0].label in doubtful)


def addresses(hosts: Sequence[Host], transports: Sequence[Machine | Problem]) -> list[str]:
    """Return the data address of each host that answers; empty for a host behind a gateway."""
    return [
        host.address or transport.address
        for host, transport in zip(hosts, transports, strict=True)
        if not isinstance(transport, Problem)
    ]
