"""`attach|status|logs|stop RUN`: look at a run that was started on this machine, or end it.

The folder of the run has all about it; the hosts that it ran on are recorded beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.catalog.ps import PsOptions, ps
from rackrun.launcher.commands.parse import SPELLINGS
from rackrun.launcher.output.console import say
from rackrun.launcher.viewer.attach import AttachOptions, attach
from rackrun.launcher.viewer.logs import LogsOptions, logs
from rackrun.launcher.viewer.reach import RunOptions, plan_in
from rackrun.launcher.viewer.status import StatusOptions, status
from rackrun.launcher.viewer.stop import StopOptions, stop
from rackrun.run_folder import RunFolder
from rackrun.runs import ID, NAME, Run, find_run, unknown_run


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
        plan_in(RunFolder(run.folder))  # refuses the folder of no run
        # an empty id would mean every run of this account
        raise UsageError(f"{RunFolder(run.folder).plan}: has no id of a run")
    if not options.run.startswith(run.id):
        say(str(run))
    return work(run, options)


def _run_elsewhere(verb: str, options: object) -> Run:
    text = str(getattr(options, "run", ""))
    if not NAME.fullmatch(text):
        hint = f"type its id or its name; {called('ps')} lists all"
        raise UsageError(f"{text!r} cannot be a run: {hint}")
    if not (isinstance(options, RunOptions) and options.name_hosts and ID.fullmatch(text)):
        raise unknown_run(text)
    return Run(text, "")  # what its hosts have left of it can be looked for


Verb = tuple[type[Any], Callable[[Run, Any], int]]

VERBS: dict[str, Verb] = {
    "attach": (AttachOptions, attach),
    "status": (StatusOptions, status),
    "logs": (LogsOptions, logs),
    "stop": (StopOptions, stop),
}
