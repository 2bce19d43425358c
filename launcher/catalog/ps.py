"""`ps`: list the runs known here and, when hosts are named, those that the hosts know of."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher.catalog.folders import runs_in
from launcher.catalog.hosts import runs_on
from launcher.catalog.listed import SHORT_ID, ListedRun, table
from launcher.detached.known_runs import known_runs
from launcher.detached.locate import ReachOptions, open_network
from launcher.errors import HostUnreachable
from launcher.output.console import say, short_path
from launcher.run.hosts import hosts_named
from launcher.run.settings import Positional
from rackrun.commandline import parse
from rackrun.commands import called

ABOUT = "List the runs known here and, when hosts are named, those that the hosts know of."


@dataclass(frozen=True)
class PsOptions(ReachOptions):
    """Options of `ps`."""

    hosts: Positional[str] = ""
    """Also ask the hosts of this host file."""
    host_list: str = ""
    """Also ask these hosts (also: -H): gpu01,gpu[02-04]."""
    runs: Path = Path("runs")
    """Folder of run folders."""
    json: bool = False
    """Print it as JSON."""


def main(args: Sequence[str]) -> int:
    """List the runs; return the exit code."""
    return ps(parse(PsOptions, called("ps"), args, ABOUT, renamed={"-H": "--host-list"}))


def ps(options: PsOptions) -> int:
    """Print the list; return 69 when a host did not answer."""
    there, errors = _asked(options)
    listed = sorted(
        merged([*there, *_from_folders(options.runs), *_remembered()]),
        key=lambda run: run.age_seconds,
    )
    if options.json:
        sys.stdout.write(f"{json.dumps([asdict(run) for run in listed], indent=2)}\n")
    else:
        sys.stdout.write(table(listed) if listed else "no run is known here\n")
    for error in errors:
        say(f"not asked: {error}")
    return HostUnreachable.exit_code if errors else 0


def merged(runs: Iterable[ListedRun]) -> list[ListedRun]:
    """Return each run once: as it was found first, with its folder here if there is one."""
    found: list[ListedRun] = []
    for run in runs:
        same = next((place for place, other in enumerate(found) if other.is_same(run)), None)
        if same is None:
            found.append(run)
        elif run.folder and not run.detached:  # a folder here, also of what a host has told
            step = found[same].step if run.step is None else run.step
            found[same] = replace(found[same], folder=run.folder, step=step)
    return found


def _asked(options: PsOptions) -> tuple[list[ListedRun], list[str]]:
    """Return the answers of the named hosts, and why the others gave none."""
    if not options.hosts and not options.host_list:
        return [], []
    hosts = hosts_named(Path(options.hosts), options.host_list)
    network = open_network(options.ssh_config, options)
    try:
        runs, errors = runs_on(hosts, network.try_each(hosts))
    finally:
        network.close()
    return runs, [str(error) for error in errors]


def _from_folders(runs: Path) -> Iterator[ListedRun]:
    """Yield the runs of the folder here and of those from which detached runs were started."""
    folders = {folder.resolve(): folder for folder in (runs, *map(Path, _known_folders()))}
    for folder in folders:
        for run in runs_in(folder):
            yield replace(run, folder=short_path(Path(run.folder)))


def _known_folders() -> list[str]:
    return sorted({known.runs for known in known_runs().values()})


def _remembered() -> Iterator[ListedRun]:
    """Yield the runs that were started from here, of which only their hosts know more."""
    for run, known in known_runs().items():
        yield ListedRun(
            run=run,
            name=known.name,
            task=known.task,
            hosts=tuple(str(host.get("label", "")) for host in known.hosts),
            state="unknown",
            exit_code=None,
            step=None,
            age_seconds=round(max(0.0, time.time() - known.at), 1),
            folder="",
            detached=len(run) == SHORT_ID,
        )
