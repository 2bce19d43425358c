"""A run on hosts that are already reached: look at them, plan, run; again after a failure.

    result = Launch(spec).run()

The transports lead over SSH, or to this machine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rackrun.errors import Problem
from rackrun.launcher.errors import HostError
from rackrun.launcher.files.download import fetch_results, fetch_returned
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.planning import environments, plan_for, preflight, refuse_ranks
from rackrun.launcher.lifecycle.restart_policy import RestartState, after
from rackrun.launcher.lifecycle.session import (
    PORT_TRIES,
    OpenScreen,
    Session,
    open_screen,
    report_end,
)
from rackrun.launcher.output.console import last_line, say
from rackrun.launcher.output.on_event import EventCommand
from rackrun.launcher.output.record import RunRecord
from rackrun.launcher.preflight.facts import NO_FACTS
from rackrun.launcher.run.job import FunctionCall, JobTemplate
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.transport.base import Transport
from rackrun.runs import SHORT_ID
from rackrun.signals import ended_by_a_signal


class Launch:
    """The attempts of one launch: what they share, and how the newest ended."""

    def __init__(self, spec: LaunchSpec, screens: OpenScreen = open_screen) -> None:
        """Take the spec of all attempts, whose probes hold the hosts for the first one.

        `screens` opens the screen of an attempt.
        """
        self.spec = spec
        self._screens = screens
        self._id_prefix = secrets.token_hex(SHORT_ID // 2)
        self._record: RunRecord | None = None
        """Of the newest attempt."""
        self.result: Result | None = None
        """The result of the newest attempt."""
        self._runs: list[str] = []
        """The run folders of failed attempts, the newest first."""
        self._began = 0.0
        """When the first attempt began: the time limit counts from there on."""
        self._alerts = EventCommand(spec.settings.jobs.on_event)

    @property
    def final(self) -> Result:
        """The result of the newest attempt, once there is one."""
        assert self.result is not None
        return self.result

    def run(self, attend: Callable[[Attempt], object] | None = None) -> Result:
        """Make attempts until one succeeds or no further one is allowed; return the last result.

        `attend` takes each attempt to its end; without it, results are fetched and that is all.
        Raises HostError when the hosts are not fit for the first attempt.
        """
        state: RestartState | None = self.spec.restart_state
        try:
            while state is not None:
                try:
                    attempt = self._attempt(state, attend or Attempt.complete)
                except HostError as error:
                    if self.result is None or not error.hosts:
                        raise
                    state = self._without(state, error)
                else:
                    state = self._following(state, attempt)
        finally:
            if self.result is not None:
                report_end(self._alerts, self.result, self._say)
            if self._record is not None and self.result is not None:
                self._record.end(self.result.exit_code)
        return self.final

    # -- an attempt

    def _attempt(self, state: RestartState, attend: Callable[[Attempt], object]) -> Attempt:
        """Return an attempt that has ended; another one when the master's port was taken."""
        for _ in range(PORT_TRIES):  # until torchrun binds it, any program can take the port
            with self._prepared(state) as attempt:
                attend(attempt)
            self.result, self._record = attempt.result, attempt.session.record
            if not self.final.port_was_taken:
                break
        return attempt

    @contextmanager
    def _prepared(self, state: RestartState) -> Iterator[Attempt]:
        """Look at the hosts and open a session on the active ones, when all are fit for it."""
        active = state.active()
        settings, jobs = self.spec.settings, self.spec.settings.jobs
        is_first = not self._runs  # an unfit spare is reported at once, not when it is needed
        hosts = state.hosts if is_first else active
        transport_of = {
            host.label: transport
            for host, transport in zip(self.spec.hosts, self.spec.reached, strict=True)
        }
        transports = [transport_of[host.label] for host in hosts]
        work = after(self.spec.work, self._runs)
        spec = replace(self.spec, hosts=hosts, transports=transports, work=work)
        self.spec = replace(self.spec, probed=NO_FACTS)  # this attempt takes its probes over
        with preflight(spec, self._say, is_restart=not is_first) as all_hosts:
            cluster = all_hosts.first(len(active))
            if is_first:
                refuse_ranks(cluster)
                for line in environments(cluster):
                    self._say(line)
            job = self._timed(jobs).job(work, jobs.new_folder(work), self._id_prefix)
            plan = plan_for(job, cluster, settings)
            # The probes of active hosts become their agents: that saves a login to each.
            containers = [host.container for host in plan.hosts]
            agents = cluster.successors(transports[: len(active)], containers)
            screen = self._screens(job, plan, settings.plain)
            with Session(
                job, plan, agents, screen, versions=cluster.versions, alerts=self._alerts
            ) as session:
                yield Attempt(session, transports)

    def _say(self, text: str) -> None:
        say(text)
        if self._record is not None:
            self._record.note(text)

    def _timed(self, jobs: JobTemplate) -> JobTemplate:
        self._began = self._began or time.monotonic()
        limit = jobs.time_limit_seconds
        # At least a second, as 0 means no limit: an attempt that is too late ends at once.
        left = max(1.0, limit - (time.monotonic() - self._began)) if limit else 0.0
        return replace(jobs, time_limit_seconds=left)

    # -- between attempts; a state of None ends the launch

    def _following(self, state: RestartState, attempt: Attempt) -> RestartState | None:
        following = None if attempt.is_abandoned else state.after(self.final)
        if following is None:
            return None
        settings = self.spec.settings.before_all()
        line = f"restart {following.restarts} of {settings.restarts.max_restarts}"
        self.spec = replace(self.spec, settings=settings)
        self._runs.insert(0, str(settings.jobs.runs / self.final.folder.name))
        self._say(line)
        text = f"{line}; {last_line(self.final)}"
        self._alerts.send("restart", self.final.folder, text, self.final.host, self.final.rank)
        return following

    def _without(self, state: RestartState, error: HostError) -> RestartState | None:
        for line in str(error).splitlines():
            self._say(f"left out: {line}")
        following = state.without(error.hosts)
        if following is None:
            self._say(f"too few hosts are left; {last_line(self.final)}")
        return following


@dataclass
class Attempt:
    """One run on hosts that are fit for it."""

    session: Session
    transports: Sequence[Transport]
    """The ways to the hosts of the plan, in its order, and behind them those to spares."""
    is_abandoned: bool = False
    """The user did not wait for the results: no further attempt is to follow."""

    @property
    def result(self) -> Result:
        """The result, once the attempt has been supervised."""
        assert self.session.result is not None
        return self.session.result

    @property
    def plan(self) -> Plan:
        """The plan of the hosts that take part."""
        return self.session.plan

    def complete(self) -> None:
        """Run until the end, and fetch the results."""
        self.session.supervise()
        self.session.note(self.fetch_results())

    def fetch_results(self) -> str:
        """Fetch what the first rank's host has in its run folder; return that, or why nothing."""
        # Spares of a run that restarts have a transport, and are not in the plan.
        pairs = list(zip(self.transports, self.plan.hosts, strict=False))
        transport, first = pairs[0]
        left = f"the results are still on {first.name}, in {first.folder}"
        if self.result.hosts[first.name] != "clean":
            return left
        job, run_id = self.session.job, self.plan.run_id
        try:
            with ended_by_a_signal():
                fetched = fetch_results(
                    transport, first, run_id, job.folder.path, say=self.session.note
                )
                if isinstance(job.work, FunctionCall):  # what it returned on each rank
                    for transport, host in pairs:
                        if self.result.hosts[host.name] == "clean":
                            fetch_returned(transport, host, run_id, job.folder.returned)
                return str(fetched)
        except KeyboardInterrupt:
            self.is_abandoned = True
            return f"not waited for: {left}"
        except (Problem, OSError) as error:
            return f"{left}: {str(error).removeprefix(f'{first.name}: ')}"
