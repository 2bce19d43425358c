"""`./run-ssh attach|status|logs|stop RUN-ID`: manage a detached run from any machine.

The first host of the run has its record, and its controller while it runs (see
`launcher/remote/run_manager.py`). The hosts are those recorded here when the run was started, or
those of --hosts FILE.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from launcher.commands.parse import parse
from launcher.detached.attach import AttachOptions, attach
from launcher.detached.logs import LogsOptions, logs
from launcher.detached.status import StatusOptions, status
from launcher.detached.stop import StopOptions, stop
from rackrun.errors import UsageError


def main(verb: str, args: Sequence[str]) -> int:
    """Run `./run-ssh VERB ARGS`."""
    settings, work, about = VERBS[verb]
    options = parse(settings, f"./run-ssh {verb}", args, about)
    if not re.fullmatch(r"[0-9a-f]{1,32}", options.run):
        raise UsageError(f"{options.run!r} is no run id: --detach printed one, such as 3fa81c02")
    return work(options)


Verb = tuple[type[Any], Callable[[Any], int], str]

VERBS: dict[str, Verb] = {
    "attach": (
        AttachOptions,
        attach,
        "Show a detached run from its first line on; Ctrl-C detaches.",
    ),
    "status": (StatusOptions, status, "Show what of a detached run really runs on every host."),
    "logs": (LogsOptions, logs, "Print what the ranks of a detached run wrote."),
    "stop": (StopOptions, stop, "End a detached run as Ctrl-C would, and look at every host."),
}
