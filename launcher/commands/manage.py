"""`attach|status|logs|stop RUN`: look at a run that was started on this machine, or end it.

The folder of the run has all about it, its hosts included.
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
from rackrun.launcher.viewer.reach import plan_of
from rackrun.launcher.viewer.status import StatusOptions, status
from rackrun.launcher.viewer.stop import StopOptions, stop
from rackrun.runs import NAME, Run, find_run, runs_going_on, unknown_run


def main(args: Sequence[str]) -> int:
    """Run the command that the first argument names; return its exit code."""
    verb, *args = args
    settings, work = VERBS[verb]
    options = parse(settings, called(verb), args, renamed=SPELLINGS)
    if not options.run and verb == "status":  # without a run, `status` is the list of all
        return ps(PsOptions(json=options.json))
    run = find_run(options.run) if options.run else _only_running(verb)
    if run is None and not NAME.fullmatch(options.run):
        hint = f"type its ID or its name; {called('ps')} lists all"
        raise UsageError(f"{options.run!r} is not the name of a run: {hint}")
    if run is None:
        raise unknown_run(options.run)
    plan_of(run.folder)  # refuses the folder of no run
    if not run.id:  # which would mean every run of this account
        raise UsageError(f"{run.folder.plan}: has no run ID")
    if not options.run or not options.run.startswith(run.id):
        say(str(run))
    return work(run, options)


def _only_running(verb: str) -> Run:
    running = runs_going_on()
    if len(running) == 1:
        return running[0]
    count = f"{len(running)} are running" if running else "none is running"
    hint = f"type: {called(verb)} RUN; {called('ps')} lists all"
    raise UsageError(f"{verb}: which run? {count}; {hint}")


Verb = tuple[type[Any], Callable[[Run, Any], int]]

VERBS: dict[str, Verb] = {
    "attach": (AttachOptions, attach),
    "status": (StatusOptions, status),
    "logs": (LogsOptions, logs),
    "stop": (StopOptions, stop),
}
