"""`ps`: list the runs known here, and those that hosts know of.

Without hosts, those are asked that look after a detached run which was started here.
"""

from __future__ import annotations

import json
import sys
import time
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
from rackrun.launcher.catalog.listed import ListedRun, table
from rackrun.launcher.detached.known_runs import hosts_of
from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.output.console import say, short_path
from rackrun.launcher.run.hosts import Host, hosts_named
from rackrun.launcher.run.settings import ReachOptions
from rackrun.launcher.transport.parallel import each
from rackrun.run_folder import RUNS
from rackrun.runs import SHORT_ID, recorded_runs

KNOWN_SECONDS = 10.0  # for hosts that the command line does not name


@dataclass(frozen=True)
class PsOptions(ReachOptions):
    """List the runs known here and, when hosts are named, those that the hosts know of."""

    examples: ClassVar[Examples] = (
        ("{prog}", "runs of this folder, and those started from here"),
        ("{prog} hosts.txt", "also what these hosts know of"),
        ("{prog} --json", "as JSON"),
    )

    hosts: Positional[str] = ""
    """Also ask the hosts of this host file."""
    host_list: str = ""
    """Also ask these hosts (also: -H): gpu01,gpu[02-04]."""
    runs: Path = RUNS
    """Folder that contains run folders."""
    json: bool = False
    """Print it as JSON."""


def main(args: Sequence[str]) -> int:
    """List the runs; return the exit code."""
    return ps(parse(PsOptions, called("ps"), args, renamed={"-H": "--host-list"}))


def ps(options: PsOptions) -> int:
    """Print the list; return 69 when a host that was named did not answer."""
    folders = list(_from_folders(options.runs))
    named = bool(options.hosts or options.host_list)
    if named:
        hosts = hosts_named(Path(options.hosts), options.host_list)
        reported, errors = _reported("", hosts, options)
    else:
        reported, errors = _reported_by_recorded_hosts(options, folders)
    runs = merged([*reported, *folders, *_recorded()])
    listed = sorted(runs, key=lambda run: run.age_seconds)
    if options.json:
        sys.stdout.write(f"{json.dumps([asdict(run) for run in listed], indent=2)}\n")
    else:
        sys.stdout.write(table(listed) if listed else "no run is known here\n")
    for error in errors:
        say(f"not asked: {error}")
    return HostUnreachable.exit_code if errors and named else 0


def merged(runs: Iterable[ListedRun]) -> list[ListedRun]:
    """Return each run once: as it was found first, with its folder here if there is one."""
    unique: list[ListedRun] = []
    for run in runs:
        same = next((index for index, other in enumerate(unique) if other.is_same(run)), None)
        if same is None:
            unique.append(run)
        elif run.folder and not run.detached:  # a folder here, of a run that a host has reported
            step = unique[same].step if run.step is None else run.step
            unique[same] = replace(unique[same], folder=run.folder, step=step)
    return unique


def _reported(
    config: str, hosts: Sequence[Host], options: PsOptions
) -> tuple[list[ListedRun], list[Problem]]:
    from rackrun.launcher.catalog.hosts import (
        runs_on,  # half of the time of a list that asks no host
    )
    from rackrun.launcher.transport.ssh import open_network

    with closing(open_network(options, config)) as network:
        return runs_on(hosts, network.try_each(hosts))


def _reported_by_recorded_hosts(
    options: PsOptions, folders: Sequence[ListedRun]
) -> tuple[list[ListedRun], list[Problem]]:
    # The first host of a detached run knows its state. Runs whose result is in a folder here are
    # left out: their hosts may be long gone, and would only delay the list.
    over = [run.run for run in folders if run.state not in ("running", "killed")]
    records = {
        run: record
        for run, record in recorded_runs().items()
        if len(run) == SHORT_ID
        and hosts_of(record)
        and not any(ended.startswith(run) for ended in over)
    }
    targets = {
        (record.ssh_config, host.label): (record.ssh_config, host)
        for record in records.values()
        for host in hosts_of(record)[:1]
    }

    def ask(target: tuple[str, Host]) -> list[ListedRun]:
        config, host = target
        runs, errors = _reported(config, [host], options)
        if errors:
            raise errors[0]
        return runs

    def late(target: tuple[str, Host]) -> Problem:
        return HostUnreachable(f"{target[1].label}: does not answer within {KNOWN_SECONDS:g} s")

    outcomes = each(ask, list(targets.values()), KNOWN_SECONDS, late)
    reported = [run for outcome in outcomes if not isinstance(outcome, Problem) for run in outcome]
    errors = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    return [run for run in reported if run.run in records], errors


def _from_folders(runs: Path) -> Iterator[ListedRun]:
    # the folder here, and those from which detached runs were started
    recorded_folders = sorted({record.runs for record in recorded_runs().values()})
    folders = {folder.resolve(): folder for folder in (runs, *map(Path, recorded_folders))}
    for folder in folders:
        for run in runs_in(folder):
            yield replace(run, folder=short_path(Path(run.folder)))


def _recorded() -> Iterator[ListedRun]:
    # detached runs that were started from here; only their hosts know their state
    for run, record in recorded_runs().items():
        yield ListedRun(
            run=run,
            name=record.name,
            task=record.task,
            hosts=tuple(host.label for host in hosts_of(record)),
            state="unknown",
            exit_code=None,
            step=None,
            age_seconds=round(max(0.0, time.time() - record.at), 1),
            folder="",
            detached=len(run) == SHORT_ID,
        )
