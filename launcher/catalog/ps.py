"""`ps`: list the runs whose folders are here and, where hosts are named, what they run."""

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
from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.output.console import say, short_path
from rackrun.launcher.run.hosts import Host, hosts_named
from rackrun.launcher.run.settings import ReachOptions
from rackrun.launcher.viewer.known_runs import hosts_of
from rackrun.run_folder import RUNS
from rackrun.runs import SHORT_ID, recorded_runs


@dataclass(frozen=True)
class PsOptions(ReachOptions):
    """List the runs known here and, when hosts are named, those that run on them."""

    examples: ClassVar[Examples] = (
        ("{prog}", "runs of this folder, and those started from here"),
        ("{prog} hosts.txt", "also what these hosts run"),
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
    reported: list[ListedRun] = []
    errors: list[Problem] = []
    if options.hosts or options.host_list:
        reported, errors = _reported(hosts_named(Path(options.hosts), options.host_list), options)
    listed = sorted(
        unique([*_from_folders(options.runs), *reported, *_recorded()]),
        key=lambda run: run.age_seconds,
    )
    if options.json:
        sys.stdout.write(f"{json.dumps([asdict(run) for run in listed], indent=2)}\n")
    else:
        sys.stdout.write(table(listed) if listed else "no run is known here\n")
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
    from rackrun.launcher.catalog.hosts import (
        runs_on,  # half of the time of a list that asks no host
    )
    from rackrun.launcher.transport.ssh import open_network

    with closing(open_network(options)) as network:
        return runs_on(hosts, network.try_each(hosts))


def _from_folders(runs: Path) -> Iterator[ListedRun]:
    # the folder here, and those of runs on hosts that were started elsewhere on this machine
    recorded_folders = sorted({record.runs for record in recorded_runs().values()})
    folders = {folder.resolve(): folder for folder in (runs, *map(Path, recorded_folders))}
    for folder in folders:
        for run in runs_in(folder):
            yield replace(run, folder=short_path(Path(run.folder)))


def _recorded() -> Iterator[ListedRun]:
    # runs on hosts that were started from here, and whose folders are gone
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
        )
