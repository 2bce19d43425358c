"""`ps`: list the runs whose folders are here and, where hosts are named, what they run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.errors import Problem
from rackrun.launcher.catalog.folders import runs_in
from rackrun.launcher.catalog.listed import ListedRun, table, task_of
from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.output.console import say, short_path
from rackrun.launcher.run.hosts import Host, hosts_named
from rackrun.launcher.run.settings import ReachOptions
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.viewer.reach import Reached, each_in_time, processes_on
from rackrun.launcher.viewer.replies import HostRuns, LivingAgent
from rackrun.run_folder import RUNS
from rackrun.runs import SHORT_ID, name_of


@dataclass(frozen=True)
class PsOptions(ReachOptions):
    """List the runs of this folder and, if hosts are named, those that run there."""

    examples: ClassVar[Examples] = (
        ("{prog}", "the runs of this folder"),
        ("{prog} hosts.txt", "also what these hosts run"),
        ("{prog} --json", "as JSON"),
    )

    hosts: Positional[str] = ""
    """Also ask the hosts in this host file."""
    host_list: str = ""
    """Also ask these hosts (also: -H): gpu01,gpu[02-04]."""
    runs: Path = RUNS
    """Folder that contains run folders."""
    json: bool = False
    """Print the result as JSON."""


def main(args: Sequence[str]) -> int:
    """List the runs; return the exit code."""
    return ps(parse(PsOptions, called("ps"), args, renamed={"-H": "--host-list"}))


def ps(options: PsOptions) -> int:
    """Print the list; return 69 when a host that was named did not answer."""
    reported: list[ListedRun] = []
    errors: list[Problem] = []
    if options.hosts or options.host_list:
        reported, errors = _reported(hosts_named(Path(options.hosts), options.host_list), options)
    here = (replace(run, folder=short_path(Path(run.folder))) for run in runs_in(options.runs))
    listed = sorted(unique([*here, *reported]), key=lambda run: run.age_seconds)
    if options.json:
        sys.stdout.write(f"{json.dumps([asdict(run) for run in listed], indent=2)}\n")
    else:
        sys.stdout.write(table(listed) if listed else f"no run in {options.runs}/\n")
    for error in errors:
        say(f"not asked: {error}")
    return HostUnreachable.exit_code if errors else 0


def unique(runs: Iterable[ListedRun]) -> list[ListedRun]:
    """Return each run once, as it was found first: with its folder here if there is one."""
    found: dict[str, ListedRun] = {}
    for run in runs:
        found.setdefault(run.run[:SHORT_ID], run)
    return list(found.values())


def _reported(hosts: Sequence[Host], options: PsOptions) -> tuple[list[ListedRun], list[Problem]]:
    from rackrun.launcher.transport.ssh import open_network  # Fabric takes its time to import

    with closing(open_network(options)) as network:
        return _runs_on(hosts, network.try_each(hosts))


def _runs_on(
    hosts: Sequence[Host], transports: Sequence[Transport | Problem]
) -> tuple[list[ListedRun], list[Problem]]:
    """Return the runs of all hosts that answer, and the others' errors."""
    outcomes = each_in_time(_asked, list(zip(hosts, transports, strict=True)))
    errors = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    answered = [
        (host.label, outcome)
        for host, outcome in zip(hosts, outcomes, strict=True)
        if not isinstance(outcome, Problem)
    ]
    agents = [(host, agent) for host, reply in answered for agent in reply.agents]
    return list(_runs_of(agents)), errors


def _asked(pair: Reached) -> HostRuns:
    host, transport = pair
    with processes_on(transport, host.python) as client:
        return client.parsed(client.call("list"), HostRuns)


def _runs_of(agents: Sequence[tuple[str, LivingAgent]]) -> Iterator[ListedRun]:
    # one entry for the agents of a run, whichever hosts they are on
    for run in dict.fromkeys(agent.run for _, agent in agents):
        living = [(host, agent) for host, agent in agents if agent.run == run]
        first = living[0][1]
        yield ListedRun(
            run=run,
            name=name_of(first.folder.rpartition("/")[2]),
            task=task_of(first.command),
            hosts=tuple(host for host, _ in living),
            state="running",
            exit_code=None,
            step=None,
            age_seconds=max(agent.seconds for _, agent in living),
            folder=f"{living[0][0]}:{first.folder}",
        )
