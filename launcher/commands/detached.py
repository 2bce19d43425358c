"""`./run-ssh attach|status|logs|stop RUN`: manage a run, a detached one from any machine.

The first host of the run has its record, and its controller while it runs (see
`launcher/remote/run_manager.py`). The hosts are those recorded here when the run was started, or
those of --hosts FILE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.catalog.ps import PsOptions, ps
from rackrun.launcher.commands.parse import SPELLINGS
from rackrun.launcher.detached.attach import AttachOptions, attach
from rackrun.launcher.detached.locate import (
    HOSTS_FILE,
    RunOptions,
    is_attached,
    is_controlled,
    plan_in,
)
from rackrun.launcher.detached.logs import LogsOptions, logs
from rackrun.launcher.detached.status import StatusOptions, status
from rackrun.launcher.detached.stop import StopOptions, stop
from rackrun.launcher.output.console import say
from rackrun.run_folder import RunFolder
from rackrun.runs import NAME, SHORT_ID, Run, find_run, unknown_run


def main(args: Sequence[str]) -> int:
    """Run the command that the first word names; return its exit code."""
    verb, *args = args
    settings, work = VERBS[verb]
    options = parse(settings, called(verb), args, renamed=SPELLINGS)
    if not options.run and verb == "status":  # without a run, `status` is the list of all
        return ps(
            PsOptions(
                hosts=options.hosts,
                host_list=options.host_list,
                json=options.json,
                ssh_config=options.ssh_config,
                accept_new=options.accept_new,
            )
        )
    if not options.run:
        raise UsageError(f"{verb} of which run? type: {called(verb)} RUN; {called('ps')} lists all")
    run = find_run(options.run) or _run_elsewhere(verb, options)
    if run.folder and not run.id:
        plan_in(RunFolder(run.folder))  # the folder of no run is named before hosts are asked
    if run.id == run.asked and not options.run.startswith(run.id):
        say(str(run))
    is_short = run.name == options.run or (
        run.is_called(options.run) and not is_attached(options.run)
    )
    if options.name_hosts and is_short and run.record is None and verb != "stop":
        # its folder, which the hosts may share, does not show whether a controller looks after it
        run = Run("", run.name, asked=options.run)
    if verb != "attach" or is_controlled(run, options):
        return work(run, options)
    text = run.id[:SHORT_ID] or run.folder
    if run.is_over:
        raise UsageError(f"{run} was attached and is over; type: {called('logs')} {text}")
    follow = f"{called('logs')} --follow {text}"
    raise UsageError(f"{run} has its own terminal, where it was started; type: {follow}")


def _run_elsewhere(verb: str, options: RunOptions) -> Run:
    # This machine has no record of it: its hosts are asked.
    if not NAME.fullmatch(options.run):
        hint = f"type its id or its name; {called('ps')} lists all"
        raise UsageError(f"{options.run!r} cannot be a run: {hint}")
    if not (options.name_hosts or HOSTS_FILE.exists()):
        raise unknown_run(options.run, verb)
    return Run(options.run if is_attached(options.run) else "", "", asked=options.run)


Verb = tuple[type[Any], Callable[[Run, Any], int]]

VERBS: dict[str, Verb] = {
    "attach": (AttachOptions, attach),
    "status": (StatusOptions, status),
    "logs": (LogsOptions, logs),
    "stop": (StopOptions, stop),
}
