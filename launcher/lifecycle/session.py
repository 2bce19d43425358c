"""One run of a plan from end to end: display, supervision, result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

from rackrun.atomic import write_whole
from rackrun.contract import variables
from rackrun.launcher.output.console import Display, PlainOutput, last_line, say, start_line
from rackrun.launcher.output.journal import JournaledDisplay
from rackrun.launcher.output.log_files import (
    LogFiles,
    unfinished_run_notice,
    write_result,
    write_run_page,
)
from rackrun.launcher.output.on_event import EventCommand
from rackrun.launcher.output.record import Recorder, RunRecord
from rackrun.launcher.run.job import Job
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.supervision.agents import AgentGroup
from rackrun.launcher.supervision.peers import Peers
from rackrun.launcher.supervision.signals import SignalQueue
from rackrun.launcher.supervision.supervisor import Supervisor
from rackrun.launcher.transport.base import Transport
from rackrun.signals import ended_by_a_signal

OpenScreen: TypeAlias = Callable[[Job, Plan, bool], AbstractContextManager[Display]]
"""Makes the display of a run; True: plain lines instead of the dashboard."""


def open_screen(job: Job, plan: Plan, plain: bool) -> AbstractContextManager[Display]:
    """Return the dashboard on a terminal, plain lines elsewhere."""
    if plain or not sys.stdout.isatty() or wants_lines(os.environ):
        return PlainOutput(plan)
    from rackrun.launcher.output.dashboard import Dashboard

    return Dashboard(plan, job.work.name, job.folder.path)


def wants_lines(environment: Mapping[str, str]) -> bool:
    """Return True where CI, a terminal that cannot redraw, or our variable asks for lines."""
    is_ci = environment.get("CI", "").lower() in ("1", "true")
    is_asked = environment.get(variables.PLAIN, "") not in ("", "0")
    return is_ci or is_asked or environment.get("TERM", "dumb") == "dumb"


class Session:
    """One run of a plan, from its first agent to its last line.

    with Session(job, plan, transports, screen) as session:
        session.supervise()
        session.note(...)       shown before the last line, which comes at the end of the block
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        transports: Sequence[Transport],
        screen: AbstractContextManager[Display],
        record: RunRecord,
        peers: Peers | None = None,
        versions: str = "",
        alerts: EventCommand | None = None,
    ) -> None:
        """Take the transports in the order of the plan's hosts, and the record of the run.

        `peers` look after the other hosts of a run of which this plan is a part; `versions` are
        those of the hosts' torch and driver, for the first line; `alerts` gets what happens.
        """
        self.job = job
        self.result: Result | None = None
        self.record = record
        self.plan = plan
        self._transports = transports
        self._screen_context = screen
        self._screen: Display | None = None  # none before the start, nothing to show without one
        self._recorder: Recorder | None = None
        self._peers = peers
        self._versions = versions
        self._alerts = alerts or EventCommand(())

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *reason: object) -> None:
        # Only now: between the end of a run and its last line, results are fetched, notes shown.
        if self.result is not None and self._screen is not None and self._recorder is not None:
            self._recorder.finish(self.result)
            self._screen.finish(self.result)

    def supervise(self) -> Result:
        """Start the plan, and supervise it to its end."""
        job, unfinished = self.job, ""
        if job.folder.attempt == 1:
            unfinished = unfinished_run_notice(job.folder.path.parent, besides=job.folder.path)
        signals = SignalQueue()
        with signals.installed():  # before there is a plan: a run with a plan gets a result
            logs = LogFiles(job.folder, self.plan)
            settings = job.template.settings
            if settings and not job.folder.node:  # of several nodes, the first one writes them
                write_whole(job.folder.settings, settings.encode(), mode=0o600)  # has --env values
            with self._screen_context as self._screen:
                self._recorder = self.record.attempt(job, self.plan)
                self.note(unfinished)
                if not self.plan.task and self._peers is None:  # a task's rank 0 tells more
                    self.note(start_line(self.plan, self._versions, job.folder.path))
                journal = JournaledDisplay(job, self.plan, self._screen, self._recorder)
                agents = AgentGroup(self.plan, self._transports)
                self.result = Supervisor(
                    job, agents, logs, journal, self._peers, self._alerts, signals
                ).supervise()
                journal.close()
        if self.result.verdict == "failed":
            from rackrun.launcher.lifecycle.sick_gpus import sick_gpus  # rarely needed

            # A GPU that fell off the bus shows itself as any exception of CUDA: its host is asked.
            for host, problems in sick_gpus(self.plan, self._transports, self.result):
                self.note(f"{host}: probable cause: {problems}")
        return self.result

    def note(self, text: str) -> None:
        """Show a line, if there is one."""
        if text and self._screen is not None and self._recorder is not None:
            self._recorder.note(text)
            self._screen.note(text)


def run(
    job: Job,
    plan: Plan,
    transports: Sequence[Transport],
    plain: bool = False,
    peers: Peers | None = None,
    replan: Callable[[Job], Plan] | None = None,
) -> Result:
    """Run a plan from end to end; `plain`: no dashboard on a terminal.

    With `replan`, once more if another program took the port in between.
    """
    alerts = EventCommand(() if job.folder.node else job.template.on_event)
    record, result = RunRecord(job.folder), None
    while True:
        screen = open_screen(job, plan, plain)
        with Session(job, plan, transports, screen, record, peers, alerts=alerts) as session:
            result = session.supervise().after(result)
            tries_again = replan is not None and job.folder.attempt == 1 and result.port_was_taken
            if not tries_again:
                session.note(write_result(job.folder, result))
        if replan is None or not tries_again:
            close_run(record, plan, result, alerts, say)
            return result
        job = job.again()
        plan = replan(job)


def close_run(
    record: RunRecord,
    plan: Plan,
    result: Result,
    alerts: EventCommand,
    say: Callable[[str], object],
) -> None:
    """Draw the page of a run whose result is written, tell the user's command, end the record."""
    if problem := write_run_page(result.folder, plan.task):
        say(problem)
    report_end(alerts, result, say)
    record.end(result.exit_code)


def report_end(alerts: EventCommand, result: Result, say: Callable[[str], object]) -> None:
    """Run the user's command for the end of a run and wait for it; report what fails with it."""
    if not alerts.is_given:
        return
    alerts.send("end", result.folder, last_line(result), result.host, result.rank, result)
    try:
        with ended_by_a_signal():
            alerts.wait()
    except KeyboardInterrupt:
        alerts.abandon()
        say("--on-event: not waited for")
    for problem in alerts.problems():
        say(problem)
