"""`./run-ssh attach|status|logs|stop RUN`: manage a detached run from any machine.

The first host of the run has its record, and its controller while it runs (see
`launcher/remote/run_manager.py`). The hosts are those recorded here when the run was started, or
those of --hosts FILE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launcher.catalog.attached import attached_run, show_attached, stop_attached, why_not_followed
from launcher.catalog.ps import PsOptions, ps
from launcher.commands.parse import parse
from launcher.detached.attach import AttachOptions, attach
from launcher.detached.known_runs import CALLED
from launcher.detached.logs import LogsOptions, logs
from launcher.detached.status import StatusOptions, status
from launcher.detached.stop import StopOptions, stop
from rackrun.commands import called
from rackrun.errors import UsageError


def main(verb: str, args: Sequence[str]) -> int:
    """Run `./run-ssh VERB ARGS`."""
    settings, work, about = VERBS[verb]
    options = parse(settings, verb, args, about)
    if not options.run and verb == "status":
        return ps(_list_options(options))
    if not options.run:
        raise UsageError(f"{verb} of which run? type: {called(verb)} RUN; {called('ps')} lists all")
    if not CALLED.fullmatch(options.run):
        hint = f"type its id or its name; {called('ps')} lists all"
        raise UsageError(f"{options.run!r} cannot be a run: {hint}")
    is_elsewhere = verb != "stop" and (options.hosts or options.host_list)
    attached = None if is_elsewhere else attached_run(options.run)
    if attached is None:
        return work(options)
    if verb == "stop":
        return stop_attached(attached, options)
    if verb == "status":
        return show_attached(attached, options.json)
    raise UsageError(why_not_followed(attached))


def _list_options(options: StatusOptions) -> PsOptions:
    """Return the options of the list for `status` of no run in particular."""
    return PsOptions(
        hosts=options.hosts,
        host_list=options.host_list,
        json=options.json,
        ssh_config=options.ssh_config,
        accept_new=options.accept_new,
    )


Verb = tuple[type[Any], Callable[[Any], int], str]

VERBS: dict[str, Verb] = {
    "attach": (
        AttachOptions,
        attach,
        "Print all output of a detached run, and follow it; Ctrl-C detaches.",
    ),
    "status": (StatusOptions, status, "Show the processes of a detached run on every host."),
    "logs": (LogsOptions, logs, "Print the output of a detached run's ranks."),
    "stop": (StopOptions, stop, "Stop a detached run as Ctrl-C would, and verify every host."),
}
