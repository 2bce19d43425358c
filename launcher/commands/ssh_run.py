"""A run on hosts behind SSH: reach them, bring the code, serve the data, look, launch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands.ssh_settings import SshOptions
from launcher.detached.known_runs import remember
from launcher.files.sync import Destination, upload_code
from launcher.files.working_tree import Code, unasked, with_untracked
from launcher.lifecycle.attempts import (
    RunObserver,
    code_here,
    course_of,
    launch_there,
    look,
    plan_for,
    wanted,
)
from launcher.lifecycle.serving import served
from launcher.lifecycle.task_check import check_task_options
from launcher.output.console import say
from launcher.preflight.checks import CHECKS, examine, refusal, table
from launcher.preflight.facts import survey
from launcher.run.hosts import Host, read_hosts, select
from launcher.run.job import RunFolder, Work, run_name
from launcher.run.plan import shown
from launcher.run.result import Result
from launcher.run.settings import HostOptions
from launcher.scaling.sweep import sweep
from launcher.schedulers.slurm import allocated
from launcher.transport.base import Transport
from rackrun.errors import Problem, UsageError

if TYPE_CHECKING:
    from launcher.transport.ssh import Machine, Network

SHORT_ID = 8  # characters of a run's id: enough to find it again


def start(work: Work, options: SshOptions) -> int:
    """Do what the options ask, and return the exit code."""
    with connected(options) as (hosts, network), check_task_options(work) as refuse:
        if options.check:
            found = network.try_each(hosts)
            refuse()
            with served(work, options.serving, addresses(hosts, found)) as there:
                return check(hosts, found, there, options)
        places = network.connect(hosts)
        refuse()
        if options.detach and not options.dry_run:
            return let_go(hosts, places, work, options)
        with served(work, options.serving, addresses(hosts, places)) as there:
            if options.dry_run:
                return show_plan(hosts, places, there, options, [options.hosts])
            code = code_there(hosts, places, options)
            if options.scaling:
                return sweep(
                    there,
                    options,
                    len(hosts),
                    lambda count, own: attached(hosts[:count], places[:count], there, own, code),
                )
            return attached(hosts, places, there, options, code).exit_code


def stay(work: Work, options: SshOptions) -> Result:
    """Launch, and return how it ended."""
    with connected(options) as (hosts, network), check_task_options(work) as refuse:
        places = network.connect(hosts)
        refuse()
        with served(work, options.serving, addresses(hosts, places)) as there:
            code = code_there(hosts, places, options)
            return attached(hosts, places, there, options, code)


def attached(
    hosts: Sequence[Host],
    places: Sequence[Machine],
    work: Work,
    options: SshOptions,
    code: Code | None,
) -> Result:
    """Launch for whoever sits here, and may have to look after some of the hosts later."""
    audience = RunObserver(advise=partial(advice, hosts, options))
    return launch_there(hosts, places, work, options, audience, code)


def advice(hosts: Sequence[Host], options: SshOptions, run: str, result: Result) -> str:
    """What to type when hosts could not be verified; remembers where they are."""
    doubtful = [name for name, state in result.hosts.items() if state != "clean"]
    if not doubtful:
        return ""
    forgotten = remember(run, hosts, options.runs, options.ssh_config)
    words = f"--hosts {options.hosts} {run}" if forgotten else run[:SHORT_ID]
    return f"once {', '.join(doubtful)} can be reached, type: ./run-ssh stop {words}"


def addresses(hosts: Sequence[Host], places: Sequence[Machine | Problem]) -> list[str]:
    """Where each host that answers has its data network; empty for one behind a gateway."""
    return [
        host.address or place.address
        for host, place in zip(hosts, places, strict=True)
        if not isinstance(place, Problem)
    ]


@contextmanager
def connected(options: SshOptions) -> Iterator[tuple[tuple[Host, ...], Network]]:
    """The hosts that the options name, and a network to reach them by, closed afterwards."""
    hosts = allocated(os.environ) if options.slurm else read_hosts(Path(options.hosts))
    hosts = select(hosts, options.include, options.exclude)
    course_of(hosts, options)  # refuses what cannot be meant before a host is troubled with it
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


def check(
    hosts: Sequence[Host],
    places: Sequence[Transport | Problem],
    work: Work,
    options: SshOptions,
) -> int:
    """Look at everything, show it, and say by the exit code whether a run could start."""
    code = code_here(options, say, [options.hosts])
    found = survey(hosts, places, wanted(work, options, code, full=True))
    found.close()
    rows = examine(found, CHECKS, options.ignore_check)
    shown = json.dumps([asdict(row) for row in rows], indent=2) if options.json else table(rows)
    sys.stdout.write(f"{shown.rstrip()}\n")
    sys.stdout.flush()
    error = refusal(found, rows)
    return error.exit_code if error else 0


def show_plan(
    hosts: Sequence[Host],
    places: Sequence[Transport],
    work: Work,
    options: HostOptions,
    own: Sequence[Path] = (),
) -> int:
    """Look at the hosts, and print what would run there; `own` files here are no code."""
    folder = RunFolder((options.runs / run_name(options.name or work.name)).resolve())
    active = course_of(hosts, options).active()
    with look(hosts, places, work, options, code_here(options, say, own)) as found:
        plan = plan_for(options.job(work, folder), found.first(len(active)), options)
    sys.stdout.write(shown(plan, options.json))
    return 0


def let_go(
    hosts: Sequence[Host], places: Sequence[Machine], work: Work, options: SshOptions
) -> int:
    """Start a detached run, and print its id."""
    from launcher.detached.start import detach, refuse_what_needs_us

    if options.scaling:
        raise UsageError("--scaling starts several runs, and shows them: leave out --detach")
    refuse_what_needs_us(work, options, addresses(hosts, places))
    code = code_there(hosts, places, options)
    run = detach(hosts, places, work, options, options.ssh_config, code)
    sys.stdout.write(f"{run}\n")
    say(f"detached; to see it: ./run-ssh attach {run}")
    return 0


def code_there(
    hosts: Sequence[Host], places: Sequence[Transport], options: SshOptions
) -> Code | None:
    """The code that the hosts are held to, as it is now; with --sync it is brought to them."""
    code = code_here(options, say, [options.hosts])
    if options.sync:
        if code is None:
            raise UsageError("--sync: git does not know this folder; type: git init")
        sync(with_untracked(code, options.sync_untracked, say), hosts, places, options)
    elif code is not None and (remark := unasked(code)):
        say(f"warning: {remark}")
    return code


def sync(
    code: Code, hosts: Sequence[Host], places: Sequence[Transport], options: SshOptions
) -> None:
    """Bring the working tree to every host, and make the environment there."""
    workdir = options.workdir or str(code.root)
    destinations = [
        Destination(place, host.workdir or workdir, host.python or options.python)
        for host, place in zip(hosts, places, strict=True)
    ]
    upload_code(code, destinations, say)
