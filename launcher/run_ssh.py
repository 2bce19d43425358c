"""`./run-ssh`: torchrun on every host of a host file, after a look at all of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from launcher.attempts import HostOptions, job_for, launch_there, look, plan_for, wanted
from launcher.carry import Destination, bring_code
from launcher.code import code_of
from launcher.data import served
from launcher.environments.slurm import allocated
from launcher.errors import LauncherError, UsageError
from launcher.hosts import Host, read_hosts, select
from launcher.job import RunFolder, Task, Work, run_name
from launcher.opinion import asked
from launcher.options import from_names, is_question, parse, split, tasks, work_of
from launcher.place import Place
from launcher.plan import describe
from launcher.preflight import CHECKS, examine, refusal, table
from launcher.result import Result
from launcher.scaling import hoisted, sweep
from launcher.survey import survey

if TYPE_CHECKING:
    from launcher.ssh import Machine, Network

DEFAULT = Task("catdog", ("--data", "data/shards"))
LATER = ("attach", "status", "logs", "stop")
"""What can be said of a detached run, in place of a host file."""


@dataclass(frozen=True)
class SshOptions(HostOptions):
    """Options of `./run-ssh`."""

    hosts: tyro.conf.Positional[Path] = Path("hosts.txt")
    """The host file: one host a line, in the order of the node ranks."""
    slurm: bool = False
    """No host file: the nodes of this Slurm allocation, from inside salloc or sbatch."""
    include: str = ""
    """Run on these hosts or slots only: gpu01,gpu[03-04],gpu02:0,1"""
    exclude: str = ""
    """Leave out these hosts or slots."""
    check: bool = False
    """Look at every host, show a table, and start no rank."""
    detach: bool = False
    """Print a run id and return; the run goes on without this machine. See attach and stop."""
    sync: bool = False
    """Bring the working tree to the hosts first: what git tracks or does not ignore."""
    accept_new: bool = False
    """Record the keys of hosts that are not in known_hosts; changed keys are refused still."""
    ssh_config: str = ""
    """An ssh_config file to use in place of your own and the system's."""


def main(args: Sequence[str]) -> int:
    """Run what the command line says, and return the exit code."""
    if args and args[0] in LATER:
        from launcher.attach import main as look_after

        return look_after(args[0], args[1:])
    words = 0 if "--slurm" in split(args, SshOptions)[0] else 1  # the host file
    own, rest = hoisted(*split(args, SshOptions, words))
    options = parse(SshOptions, "./run-ssh", own, description())
    work = work_of(rest) or DEFAULT
    if is_question(work):
        sys.stdout.flush()
        os.execv(sys.executable, work.argv(sys.executable))
    with connected(options) as (hosts, network), asked(work) as refuse:
        if options.check:
            found = network.try_each(hosts)
            with served(work, options.serving, addresses(hosts, found)) as there:
                return check(hosts, found, there, options)
        places = network.connect(hosts)
        refuse()
        if options.detach and not options.dry_run:
            return let_go(hosts, places, work, options)
        with served(work, options.serving, addresses(hosts, places)) as there:
            if options.dry_run:
                return show_plan(hosts, places, there, options)
            if options.sync:
                sync(hosts, places, options)
            if options.scaling:
                return sweep(
                    there,
                    options,
                    len(hosts),
                    lambda count, own: launch_there(hosts[:count], places[:count], there, own),
                )
            return launch_there(hosts, places, there, options).exit_code


def launch(words: Sequence[str], options: Mapping[str, object]) -> Result:
    """The same for a program: the words after the host file, and the options by name."""
    work = work_of(words) or DEFAULT
    settings = from_names(SshOptions, options)
    if settings.detach:
        raise UsageError("from Python a run stays attached; type: ./run-ssh --detach")
    with connected(settings) as (hosts, network), asked(work) as refuse:
        places = network.connect(hosts)
        refuse()
        with served(work, settings.serving, addresses(hosts, places)) as there:
            if settings.sync:
                sync(hosts, places, settings)
            return launch_there(hosts, places, there, settings)


def addresses(hosts: Sequence[Host], places: Sequence[Machine | LauncherError]) -> list[str]:
    """Where each host that answers has its data network; empty for one behind a gateway."""
    return [
        host.address or place.address
        for host, place in zip(hosts, places, strict=True)
        if not isinstance(place, LauncherError)
    ]


@contextmanager
def connected(options: SshOptions) -> Iterator[tuple[tuple[Host, ...], Network]]:
    """The hosts that the options name, and a network to reach them by, closed afterwards."""
    unknown = set(options.allow) - {check.name for check in CHECKS}
    if unknown:
        names = ", ".join(check.name for check in CHECKS)
        raise UsageError(f"--allow {min(unknown)}: no such check; there are: {names}")
    hosts = allocated(os.environ) if options.slurm else read_hosts(Path(options.hosts))
    hosts = select(hosts, options.include, options.exclude)
    from launcher.ssh import Access, Network  # Fabric takes as long to import as --help may

    config = Path(options.ssh_config) if options.ssh_config else None
    network = Network(Access(config=config, accept_new=options.accept_new))
    try:
        yield hosts, network
    finally:
        network.close()


def check(
    hosts: Sequence[Host],
    places: Sequence[Place | LauncherError],
    work: Work,
    options: SshOptions,
) -> int:
    """Look at everything, show it, and say by the exit code whether a run could start."""
    found = survey(hosts, places, wanted(work, options, full=True))
    found.close()
    rows = examine(found, CHECKS, options.allow)
    shown = json.dumps([asdict(row) for row in rows], indent=2) if options.json else table(rows)
    sys.stdout.write(f"{shown.rstrip()}\n")
    sys.stdout.flush()
    error = refusal(found, rows)
    return error.exit_code if error else 0


def show_plan(
    hosts: Sequence[Host], places: Sequence[Place], work: Work, options: HostOptions
) -> int:
    """Look at the hosts, and print what would run there."""
    folder = RunFolder((options.runs / run_name(options.name or work.name)).resolve())
    with look(hosts, places, work, options) as found:
        plan = plan_for(job_for(work, folder, options), found, options)
    text = json.dumps(asdict(plan), indent=2) if options.json else describe(plan)
    sys.stdout.write(f"{text}\n")
    return 0


def let_go(
    hosts: Sequence[Host], places: Sequence[Machine], work: Work, options: SshOptions
) -> int:
    """Start a detached run, and print its id."""
    from launcher.detach import detach, refuse_what_needs_us

    if options.scaling:
        raise UsageError("--scaling starts several runs, and shows them: leave out --detach")
    refuse_what_needs_us(work, options, addresses(hosts, places))
    if options.sync:
        sync(hosts, places, options)
    run = detach(hosts, places, work, options, options.ssh_config)
    sys.stdout.write(f"{run}\n")
    sys.stderr.write(f"rackrun: detached; to see it: ./run-ssh attach {run}\n")
    return 0


def sync(hosts: Sequence[Host], places: Sequence[Place], options: SshOptions) -> None:
    """Bring the working tree to every host, and make the environment there."""
    code = code_of(Path.cwd())
    if code is None:
        raise UsageError("--sync: git does not know this folder; type: git init")
    workdir = options.workdir or str(code.root)
    destinations = [
        Destination(place, host.workdir or workdir, host.python or options.python)
        for host, place in zip(hosts, places, strict=True)
    ]
    bring_code(code, destinations, lambda line: sys.stderr.write(f"rackrun: {line}\n"))


def description() -> str:
    """What stands at the head of the help."""
    return (
        "./run-ssh [options] HOSTS [TASK [task options] | -- COMMAND]: torchrun on every host of a"
        " file, after a look at all of them.\n"
        f"./run-ssh {'|'.join(LATER)} RUN-ID: look after a run that was started with --detach.\n"
        f"Tasks: {', '.join(tasks())}; ./run-ssh HOSTS TASK --help shows the options of a task.\n"
        "Without a task: trains catdog on data/shards."
    )
