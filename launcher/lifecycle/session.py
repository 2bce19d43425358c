"""One run from end to end: plan, folder, screen, supervision, result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

from launcher.output.console import Display, PlainOutput
from launcher.output.log_files import LogFiles, unfinished_run_notice
from launcher.run.job import Job
from launcher.run.plan import Plan
from launcher.run.result import Result
from launcher.supervision.agents import AgentGroup
from launcher.supervision.peers import Peers
from launcher.supervision.supervisor import Supervisor
from launcher.transport.base import Transport

ATTEMPTS = 2  # the second one when another program took the master's port in between

Note: TypeAlias = Callable[[str], None]
"""Takes a line of our own."""

OpenScreen: TypeAlias = Callable[[Job, Plan, bool], AbstractContextManager[Display]]
"""Makes who shows a run, for as long as it lasts; True: no board."""


def open_screen(job: Job, plan: Plan, plain: bool) -> AbstractContextManager[Display]:
    """The board when somebody sits at a terminal, plain lines otherwise."""
    if plain or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return PlainOutput(plan)
    from launcher.output.dashboard import Dashboard

    return Dashboard(plan, job.work.name)


def with_a_free_port(attempt: Callable[[], Result]) -> Result:
    """Make an attempt, and another one when the master's port was taken in between."""
    for _ in range(ATTEMPTS):
        result = attempt()
        if not result.port_was_taken:
            break
    return result


def run(
    job: Job,
    plan: Plan,
    places: Sequence[Transport],
    plain: bool = False,
    afterwards: Callable[[Result, Note], str] = lambda result, note: "",
    peers: Peers | None = None,
    screens: OpenScreen = open_screen,
) -> Result:
    """Run a plan at its places, in the order of its hosts; `plain`: no board on a terminal.

    `afterwards` is done once the result is written, and has what it tells meanwhile and at its end
    before the last line. `peers` look after the other hosts of a run of which this plan is a part.
    """
    before = unfinished_run_notice(job.folder.path.parent, besides=job.folder.path)
    journal = LogFiles(job.folder, plan)
    with screens(job, plan, plain) as screen:
        if before:
            screen.note(before)
        supervisor = Supervisor(job, AgentGroup(plan, places), journal, screen, peers)
        result = supervisor.supervise()
    try:
        if remark := journal.close(result):
            screen.note(remark)
        if remark := afterwards(result, screen.note):
            screen.note(remark)
    finally:
        screen.finish(result)
    return result
