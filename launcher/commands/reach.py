"""The hosts that the options of `./run-ssh` name, reached over SSH."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rackrun.contract.task_needs import TaskNeeds
from rackrun.errors import Problem, UsageError
from rackrun.launcher.commands.settings import SshOptions
from rackrun.launcher.errors import PreflightRefused
from rackrun.launcher.lifecycle.choosing import Need
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.planning import wait_for_busy
from rackrun.launcher.output.console import say
from rackrun.launcher.preflight.checks import CHECKS
from rackrun.launcher.preflight.examine import examine, lines_of
from rackrun.launcher.preflight.facts import NO_FACTS, ClusterFacts, gather_facts
from rackrun.launcher.remote.gpus import VISIBLE, visible_gpus
from rackrun.launcher.run.hosts import Host, hosts_named, select
from rackrun.launcher.run.kept_hosts import hosts_text
from rackrun.launcher.transport.parallel import all_or_raise

if TYPE_CHECKING:
    from rackrun.launcher.transport.ssh import Machine, Network


def listed_hosts(options: SshOptions) -> tuple[Host, ...]:
    """Return the hosts that the options name."""
    if options.slurm:
        from rackrun.launcher.schedulers.slurm import allocated

        hosts = allocated(os.environ)
    else:
        hosts = hosts_named(Path(options.hosts), options.host_list)
    hosts = select(hosts, options.include, options.exclude)
    return tuple(with_visible_gpus(host, options.environment) for host in hosts)


def with_visible_gpus(host: Host, environment: tuple[tuple[str, str], ...]) -> Host:
    """Return a host with the GPUs that --env or env= leave to its ranks: these are locked."""
    visible = dict((*environment, *host.env)).get(VISIBLE[0])
    if visible is None:
        return host
    if host.devices is not None:
        both = f"--include or --exclude chooses GPUs of {host.label}"
        raise UsageError(f"{both}, and so does {VISIBLE[0]}; leave one of them out")
    named = visible_gpus({VISIBLE[0]: visible}) or []
    if not named or not all(one.isdecimal() and len(one) < 4 for one in named):
        return host  # UUIDs are counted there, and the whole host is locked
    return replace(host, devices=tuple(dict.fromkeys(map(int, named))))


@contextmanager
def on_hosts(
    spec: LaunchSpec, options: SshOptions, bring_code: Callable[[LaunchSpec], LaunchSpec]
) -> Iterator[LaunchSpec]:
    """Yield the launch on the hosts that the options name, reached; close the network afterwards.

    Only with --check, some of them may not be reached. `bring_code` brings the code to hosts that
    are added later.
    """
    spec = replace(spec, hosts=listed_hosts(options))
    spec.restart_state.active()  # refuses spares that do not fit before a host is asked
    from rackrun.launcher.transport.ssh import open_network  # Fabric, which imports for a while

    with closing(open_network(options)) as network:
        need = Need(
            options.hosts_needed,
            options.gpus_needed,
            options.spares,
            options.gpu,
            options.gpu_memory,
        )
        if options.check:
            yield _with_transports(spec, network.try_each(spec.hosts))
            return
        if need.wants_all:  # otherwise other hosts of the list are not the run's
            adding = partial(with_added_hosts, options, network, bring_code)
            spec = replace(spec, with_added_hosts=adding)
        if need.wants_all and not need.spares:
            yield _with_transports(spec, network.connect(spec.hosts))
        else:
            yield with_chosen_hosts(spec, network, need)


def with_added_hosts(
    options: SshOptions,
    network: Network,
    bring_code: Callable[[LaunchSpec], LaunchSpec],
    spec: LaunchSpec,
) -> tuple[LaunchSpec, Sequence[Host]]:
    """Return the launch with the hosts that were added to its list, and the list as it is now."""
    hosts, known = listed_hosts(options), {host.label for host in spec.hosts}
    added = [host for host in hosts if host.label not in known]
    if not added:
        return spec, hosts
    machines = network.connect(added)
    if options.sync:
        bring_code(replace(spec, hosts=added, transports=machines))
    everything = (*spec.hosts, *added)
    text = hosts_text(everything, options.ssh_config)
    transports = (*spec.transports, *machines)
    return replace(spec, hosts=everything, transports=transports, hosts_file=text), hosts


def with_chosen_hosts(spec: LaunchSpec, network: Network, need: Need) -> LaunchSpec:
    """Return the launch on those hosts, and the GPUs of those, that are free and fit.

    Its probes end with the network.
    """
    hosts, transports = spec.hosts, network.try_each(spec.hosts)
    chosen = _take_hosts(spec, transports, need, network)
    machine_of = {host.label: each for host, each in zip(hosts, transports, strict=True)}
    picked = tuple(facts.host for facts in chosen.hosts)
    machines = all_or_raise(machine_of[host.label] for host in picked)
    # when the whole list was asked for, each drained host that is left out uses up a spare
    spares = spec.options.spares - (0 if need.hosts else len(hosts) - len(picked))
    options = replace(spec.options, spares=max(0, spares))
    return _with_transports(replace(spec, hosts=picked, options=options, probed=chosen), machines)


def _with_transports(spec: LaunchSpec, transports: Sequence[Machine | Problem]) -> LaunchSpec:
    """Return the launch with the ways to its hosts; a host behind a gateway has no address."""
    addresses = [
        host.address or transport.address
        for host, transport in zip(spec.hosts, transports, strict=True)
        if not isinstance(transport, Problem)
    ]
    return replace(spec, transports=transports, addresses=addresses)


HOLD_TRIES = 5


def _take_hosts(
    spec: LaunchSpec, transports: list[Machine | Problem], need: Need, network: Network
) -> ClusterFacts:
    # Waits until enough hosts are free, has their probes lock them, and returns their facts. Hosts
    # lost while it waits are connected again, and replaced in `transports`. Code and data are
    # checked later, as they may be copied first.
    hosts, options = spec.hosts, spec.options
    requirements = replace(spec, chooses=True, needs=TaskNeeds())
    cluster, reported, tries = NO_FACTS, "", 0
    try:
        while True:
            earlier, cluster = cluster, gather_facts(hosts, transports, requirements, cluster)
            earlier.close(besides=cluster)
            rows = examine(cluster, CHECKS)
            pick = need.pick(cluster, rows)
            taken = cluster.of(pick.hosts)
            if not pick.missing and (need.wants_all or taken.hold()):
                cluster.close(besides=taken)
                return taken
            tries += not pick.missing
            if not pick.missing and tries < HOLD_TRIES:
                continue  # another launch was faster: it may have left something
            refused = lines_of([row for row in rows if row.level == "refused"])
            text = "\n".join([pick.missing or "other launches were faster", *refused])
            if pick.cannot_succeed or not options.wait:
                raise PreflightRefused(text)
            reported = wait_for_busy(cluster, text, reported, say)
            lost = [facts.host for facts in cluster.hosts if facts.error is not None]
            again = dict(zip(lost, network.try_each(lost), strict=True))
            transports[:] = [
                again.get(host, transport)
                for host, transport in zip(hosts, transports, strict=True)
            ]
    except BaseException:
        cluster.close()
        raise
