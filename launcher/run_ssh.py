"""`./run-ssh`: torchrun on every host of a host file, after a look at all of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from launcher.carry import Destination, bring_code, fetch_results, has_checkpoint
from launcher.code import code_of
from launcher.errors import LauncherError, UsageError
from launcher.hosts import Host, read_hosts, select
from launcher.job import Job, RunFolder, Task, Work, new_run_folder, run_name
from launcher.options import Options, from_names, is_question, parse, split, tasks, work_of
from launcher.place import Place
from launcher.plan import Facts, Plan, describe, make_plan
from launcher.preflight import CHECKS, examine, refusal, table, warnings
from launcher.restart import Course, Rules, resumed
from launcher.result import Result
from launcher.session import run
from launcher.survey import Finding, Survey, Wanted, survey

if TYPE_CHECKING:
    from launcher.ssh import Network

DEFAULT = Task("catdog", ("--data", "data/shards"))
ATTEMPTS = 2  # the second one when another program took the master's port in between


@dataclass(frozen=True)
class SshOptions(Options):
    """Options of `./run-ssh`."""

    hosts: tyro.conf.Positional[Path] = Path("hosts.txt")
    """The host file: one host a line, in the order of the node ranks."""
    include: str = ""
    """Run on these hosts or slots only: gpu01,gpu[03-04],gpu02:0,1"""
    exclude: str = ""
    """Leave out these hosts or slots."""
    check: bool = False
    """Look at every host, show a table, and start nothing."""
    allow: tuple[str, ...] = ()
    """Name of a check that may fail, such as code; may be given several times."""
    sync: bool = False
    """Bring the working tree to the hosts first: what git tracks or does not ignore."""
    accept_new: bool = False
    """Record the keys of hosts that are not in known_hosts; changed keys are refused still."""
    ssh_config: str = ""
    """An ssh_config file to use in place of your own and the system's."""
    workdir: str = ""
    """Folder with the code on the hosts; by default the current folder's path."""
    python: str = ""
    """Interpreter of the ranks; by default .venv/bin/python in the workdir, or python3."""
    port: int = 0
    """Port of the master; 0: one that is free on the first host."""
    max_restarts: int = 0
    """Run again after a failure, so many times, a task from its newest checkpoint."""
    spares: int = 0
    """The last so many hosts wait until others are lost."""
    min_hosts: int = 0
    """Go on with so many hosts, when others are lost; 0: with as many as at the start."""


def main(args: Sequence[str]) -> int:
    """Run what the command line says, and return the exit code."""
    own, rest = split(args, SshOptions, words=1)
    options = parse(SshOptions, "./run-ssh", own, description())
    work = work_of(rest) or DEFAULT
    if is_question(work):
        sys.stdout.flush()
        os.execv(sys.executable, work.argv(sys.executable))
    with connected(options) as (hosts, network):
        if options.check:
            return check(hosts, network.try_each(hosts), work, options)
        places = network.connect(hosts)
        if options.dry_run:
            return show_plan(hosts, places, work, options)
        return launch_there(hosts, places, work, options).exit_code


def launch(words: Sequence[str], options: Mapping[str, object]) -> Result:
    """The same for a program: the words after the host file, and the options by name."""
    work = work_of(words) or DEFAULT
    settings = from_names(SshOptions, options)
    with connected(settings) as (hosts, network):
        return launch_there(hosts, network.connect(hosts), work, settings)


@contextmanager
def connected(options: SshOptions) -> Iterator[tuple[tuple[Host, ...], Network]]:
    """The hosts that the options name, and a network to reach them by, closed afterwards."""
    unknown = set(options.allow) - {check.name for check in CHECKS}
    if unknown:
        names = ", ".join(check.name for check in CHECKS)
        raise UsageError(f"--allow {min(unknown)}: no such check; there are: {names}")
    hosts = select(read_hosts(Path(options.hosts)), options.include, options.exclude)
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
    rows = examine(found, CHECKS, options.allow)
    shown = json.dumps([asdict(row) for row in rows], indent=2) if options.json else table(rows)
    sys.stdout.write(f"{shown.rstrip()}\n")
    sys.stdout.flush()
    error = refusal(found, rows)
    return error.exit_code if error else 0


def show_plan(
    hosts: Sequence[Host], places: Sequence[Place], work: Work, options: SshOptions
) -> int:
    """Look at the hosts, and print what would run there."""
    folder = RunFolder((options.runs / run_name(options.name or work.name)).resolve())
    plan = plan_for(job_for(work, folder, options), look(hosts, places, work, options), options)
    text = json.dumps(asdict(plan), indent=2) if options.json else describe(plan)
    sys.stdout.write(f"{text}\n")
    return 0


def launch_there(
    hosts: Sequence[Host], places: Sequence[Place], work: Work, options: SshOptions
) -> Result:
    """Look at the hosts, plan, and run; again after a failure, as far as the options go."""
    rules = Rules(options.max_restarts, options.spares, options.min_hosts)
    course = Course(rules, tuple(hosts))
    place_of = {host.label: place for host, place in zip(hosts, places, strict=True)}
    if options.sync:
        sync(hosts, places, options)
    while True:
        active = course.active()
        there = [place_of[host.label] for host in active]
        plan, result = attempt(active, there, work, options)
        following = course.after(result)
        if following is None:
            return result
        course = following
        if has_checkpoint(there, plan):
            work = resumed(work, str(options.runs / result.folder.name))
        sys.stderr.write(f"rackrun: restart {course.restarts} of {rules.max_restarts}\n")


def attempt(
    hosts: Sequence[Host], places: Sequence[Place], work: Work, options: SshOptions
) -> tuple[Plan, Result]:
    """One run; begun anew when another program took the master's port in between."""
    for _ in range(ATTEMPTS):
        found = look(hosts, places, work, options)
        folder = new_run_folder(options.runs, options.name or work.name)
        job = job_for(work, folder, options)
        plan = plan_for(job, found, options)
        result = run(job, plan, places, options.plain, partial(bring_back, places[0], plan, folder))
        if not result.port_was_taken:
            break
    return plan, result


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


def bring_back(place: Place, plan: Plan, folder: RunFolder, result: Result) -> str:
    """Fetch what the first host has in its run folder; what came, or why nothing did."""
    first = plan.hosts[0]
    if result.hosts[first.name] != "clean":
        return f"the results are still on {first.name}, in {first.folder}"
    try:
        files = fetch_results(place, first, plan.run_id, folder.path)
    except (LauncherError, OSError) as error:
        return f"the results are still on {first.name}, in {first.folder}: {error}"
    return f"{len(files)} files came back from {first.name}" if files else ""


def look(hosts: Sequence[Host], places: Sequence[Place], work: Work, options: SshOptions) -> Survey:
    """The quick part of the preflight; raises what keeps the run from starting."""
    found = survey(hosts, places, wanted(work, options))
    rows = examine(found, CHECKS, options.allow)
    for line in warnings(rows):
        sys.stderr.write(f"rackrun: warning: {line}\n")
    if error := refusal(found, rows):
        raise error
    return found


def wanted(work: Work, options: SshOptions, full: bool = False) -> Wanted:
    """What the hosts are asked about."""
    here = Path.cwd()
    return Wanted(
        workdir=options.workdir or str(here),
        python=options.python,
        code=code_of(here),
        data=data_of(work),
        port=options.port,
        full=full,
    )


def data_of(work: Work) -> str:
    """The shards that a task is told to read; empty for a command, whose words are its own."""
    options = work.options if isinstance(work, Task) else ()
    for number, word in enumerate(options):
        if word.startswith("--data="):
            return word.removeprefix("--data=")
        if word == "--data" and number + 1 < len(options):
            return options[number + 1]
    return ""


def job_for(work: Work, folder: RunFolder, options: SshOptions) -> Job:
    """The job that the options describe."""
    return Job(
        work,
        folder,
        environment=options.environment,
        secrets=options.secrets,
        limits=options.limits,
    )


def plan_for(job: Job, found: Survey, options: SshOptions) -> Plan:
    """The plan for the hosts as they were found."""
    run_folder = options.runs / job.folder.path.name
    facts = [facts_of(finding, found, run_folder) for finding in found.findings]
    return make_plan(job, facts, found.port)


def facts_of(finding: Finding, found: Survey, run_folder: Path) -> Facts:
    """What the plan needs to know of one host."""
    host, seen = finding.host, finding["look"]
    devices = ",".join(map(str, host.devices or ()))
    first = finding is found.findings[0]
    return Facts(
        name=host.label,
        address=found.master if first else host.address or finding["route"]["address"],
        processes=host.slots or seen["gpus"] or 1,
        python=seen["python"],
        workdir=seen["workdir"],
        folder=str(Path(seen["workdir"]) / run_folder),
        cores=seen["cores"],
        interface=host.interface or finding["route"].get("interface", ""),
        environment=(*((("CUDA_VISIBLE_DEVICES", devices),) if devices else ()), *host.env),
        agent_python=seen["python"],
        locks=finding.locks,
    )


def description() -> str:
    """What stands at the head of the help."""
    return (
        "./run-ssh [options] HOSTS [TASK [task options] | -- COMMAND]: torchrun on every host of a"
        " file, after a look at all of them.\n"
        f"Tasks: {', '.join(tasks())}; ./run-ssh HOSTS TASK --help shows the options of a task.\n"
        "Without a task: trains catdog on data/shards."
    )
