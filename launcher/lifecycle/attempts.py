"""A run on hosts that are already reached: look at them, plan, run; again after a failure.

    result = Launch(spec).run()

The transports lead over SSH for a launcher, over relays for the controller of a detached run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import field, replace

from launcher.errors import HostError
from launcher.files.download import fetch_results, fetch_returned
from launcher.lifecycle.host_file_watch import HostFileWatch
from launcher.lifecycle.host_incidents import remember
from launcher.lifecycle.launch_spec import LaunchSettings, LaunchSpec
from launcher.lifecycle.planning import plan_for, preflight, refuse_ranks
from launcher.lifecycle.restart_policy import RestartState, after
from launcher.lifecycle.session import PORT_TRIES, OpenScreen, Session, open_screen, report_end
from launcher.output.console import last_line, say
from launcher.output.on_event import EventCommand
from launcher.preflight.facts import NO_FACTS
from launcher.run.job import FunctionCall
from launcher.run.plan import Plan
from launcher.run.result import Result
from launcher.supervision.agents import AddedHost
from launcher.transport.base import Transport
from rackrun.errors import Problem
from rackrun.light_dataclass import dataclass
from rackrun.signals import ended_by_a_signal


@dataclass(frozen=True)
class RunObserver:
    """Outputs of a launch."""

    say: Callable[[str], object] = say
    """Takes lines between attempts."""
    screens: OpenScreen = open_screen
    """Opens the screen of an attempt."""
    id_prefix: str = ""
    """Prefix of the ids of all attempts."""


TERMINAL = RunObserver()


@dataclass
class Launch:
    """The attempts of one launch: what they share, and how each ended."""

    spec: LaunchSpec
    """What all attempts go by; its probes hold the hosts until the first one takes them over."""
    observer: RunObserver = TERMINAL
    runs: list[str] = field(default_factory=list)
    """The run folders of failed attempts, the newest first."""
    result: Result | None = None
    """The result of the newest attempt."""
    began: float = 0.0
    """When the first attempt began."""

    def __post_init__(self) -> None:
        self._alerts = EventCommand(self.spec.settings.jobs.on_event)

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
                state = self._after_attempt(state, attend or Attempt.complete)
        finally:
            if self.result is not None:
                report_end(self._alerts, self.result, self.observer.say)
        return self.final

    def _after_attempt(
        self, state: RestartState, attend: Callable[[Attempt], object]
    ) -> RestartState | None:
        """Make an attempt; return the state for the next one, None when there is to be none."""
        try:
            attempt = self._attended(state, attend)
        except HostError as error:
            if self.result is None or not error.hosts:
                raise
            return self._without(state, error)
        return self._following(self._with_added(state, attempt), attempt)

    def _with_added(self, state: RestartState, attempt: Attempt) -> RestartState:
        """Return the state with the hosts that have become part of the run."""
        hosts = [added.host for added in attempt.added]
        transports = [added.transport for added in attempt.added]
        self.spec = replace(
            self.spec,
            hosts=(*self.spec.hosts, *hosts),
            transports=(*self.spec.transports, *transports),
        )
        return replace(state, hosts=(*state.hosts, *hosts))

    def _attended(self, state: RestartState, attend: Callable[[Attempt], object]) -> Attempt:
        """Return an attempt that has ended; another one when the master's port was taken."""
        for _ in range(PORT_TRIES):  # until torchrun binds it, any program can take the port
            with self._prepared(state) as attempt:
                attend(attempt)
            self.result = attempt.result
            remember(
                attempt.plan,
                attempt.transports,
                self.final,
                attempt.doubtful,
                self.observer.say,
            )
            if not self.final.port_was_taken:
                break
        return attempt

    @contextmanager
    def _prepared(self, state: RestartState) -> Iterator[Attempt]:
        """Look at the hosts and open a session on the active ones, when all are fit for it."""
        active = state.active()
        settings, jobs = self.spec.settings, self.spec.settings.jobs
        reserve = state.reserve() if jobs.elastic else ()
        is_first = not self.runs  # an unfit spare is reported at once, not when it is needed
        hosts = state.hosts if is_first else (*active, *reserve)
        transport_of = {
            host.label: transport
            for host, transport in zip(self.spec.hosts, self.spec.reached, strict=True)
        }
        transports = [transport_of[host.label] for host in hosts]
        work = after(self.spec.work, self.runs)
        spec = replace(self.spec, hosts=hosts, transports=transports, work=work)
        self.spec = replace(self.spec, probed=NO_FACTS)  # this attempt takes its probes over
        with preflight(spec, self.observer.say, is_restart=not is_first) as all_hosts:
            cluster = all_hosts.first(len(active))
            if is_first:
                refuse_ranks(cluster)
            timed = replace(jobs, time_limit_seconds=self._time_left())
            job = timed.job(work, jobs.new_folder(work), self.observer.id_prefix)
            planned = all_hosts if reserve else cluster
            plan = plan_for(job, planned, settings, len(reserve))
            containers = [host.container for host in plan.hosts[: len(active)]]
            successors = cluster.successors(transports[: len(active)], containers)
            agents = [*successors, *transports[len(active) : len(plan.hosts)]]
            screen = self.observer.screens(job, plan, settings.plain)
            file = self.spec.host_file if jobs.elastic else None
            watch = HostFileWatch(file, self.spec, job, plan) if file else None
            with (
                watch or nullcontext(),
                Session(
                    job,
                    plan,
                    agents,
                    screen,
                    versions=cluster.versions,
                    alerts=self._alerts,
                    added_hosts=watch.take if watch else tuple,
                ) as session,
            ):
                yield Attempt(session, transports, watch, doubtful=cluster.doubtful)

    def _time_left(self) -> float:
        """Return what is left of the time limit, which counts from the first attempt on."""
        self.began = self.began or time.monotonic()
        limit = self.spec.settings.jobs.time_limit_seconds
        # At least a second, as 0 means no limit: an attempt that is too late ends at once.
        return max(1.0, limit - (time.monotonic() - self.began)) if limit else 0.0

    def _following(self, state: RestartState, attempt: Attempt) -> RestartState | None:
        """Return the state for one more attempt; None when there is to be none."""
        if attempt.hurried:
            return None
        if self.final.gave_way:
            self._change(self.spec.settings.queued_now())
            return self._noted(state, "waits to continue")
        following = state.after(self.final)
        if following is None:
            return None
        self._change(self.spec.settings.before_all())
        most = self.spec.settings.restarts.max_restarts
        return self._noted(following, f"restart {following.restarts} of {most}")

    def _change(self, settings: LaunchSettings) -> None:
        self.spec = replace(self.spec, settings=settings)

    def _noted(self, following: RestartState, line: str) -> RestartState:
        """Return the state for one more attempt, which continues from this one; print why."""
        self.runs.insert(0, str(self.spec.settings.jobs.runs / self.final.folder.name))
        self.observer.say(line)
        text = f"{line}; {last_line(self.final)}"
        self._alerts.send("restart", self.final.folder, text, self.final.host, self.final.rank)
        return following

    def _without(self, state: RestartState, error: HostError) -> RestartState | None:
        """Return the state without hosts that are not fit any more; None when too few are left."""
        for line in str(error).splitlines():
            self.observer.say(f"left out: {line}")
        following = state.without(error.hosts)
        if following is None:
            self.observer.say(f"too few hosts are left; {last_line(self.final)}")
        return following


@dataclass
class Attempt:
    """One run on hosts that are fit for it."""

    session: Session
    planned_transports: Sequence[Transport]
    """The ways to the hosts of the plan, in its order, but for those that were added."""
    watch: HostFileWatch | None = None
    """Adds hosts to an elastic run."""
    hurried: bool = False
    """The user did not wait for the results: no further attempt is to follow."""
    doubtful: frozenset[str] = frozenset()
    """Hosts to which something has happened before."""

    @property
    def result(self) -> Result:
        """The result, once the attempt has been supervised."""
        assert self.session.result is not None
        return self.session.result

    @property
    def plan(self) -> Plan:
        """The plan, once the attempt has been supervised with the hosts that were added."""
        return self.session.plan

    @property
    def transports(self) -> list[Transport]:
        """The ways to the hosts of the plan, in its order."""
        return [*self.planned_transports, *(added.transport for added in self.added)]

    @property
    def added(self) -> Sequence[AddedHost]:
        """The hosts that were added."""
        return self.watch.taken if self.watch else ()

    def complete(self) -> None:
        """Run until the end, and fetch the results."""
        self.supervise()
        self.note(self.fetch_results())

    def supervise(self) -> Result:
        """Run until the end."""
        return self.session.supervise()

    def note(self, text: str) -> None:
        """Show a line, if there is one, before the last line of the attempt."""
        self.session.note(text)

    def fetch_results(self) -> str:
        """Fetch what the first rank's host has in its run folder; return that, or why nothing."""
        pairs = zip(self.transports, self.plan.hosts, strict=False)
        transport, first = next(pair for pair in pairs if pair[1].name == self.result.leader)
        left = f"the results are still on {first.name}, in {first.folder}"
        if self.result.hosts[first.name] != "clean":
            return left
        try:
            with ended_by_a_signal():
                folder = self.session.job.folder.path
                fetched = fetch_results(transport, first, self.plan.run_id, folder, say=self.note)
                self._fetch_returned()
                return str(fetched)
        except KeyboardInterrupt:
            self.hurried = True
            return f"not waited for: {left}"
        except (Problem, OSError) as error:
            return f"{left}: {str(error).removeprefix(f'{first.name}: ')}"

    def _fetch_returned(self) -> None:
        """Fetch what a function returned on each rank, if the work is to call one."""
        job = self.session.job
        if isinstance(job.work, FunctionCall):
            for transport, host in zip(self.transports, self.plan.hosts, strict=False):
                if self.result.hosts[host.name] == "clean":
                    fetch_returned(transport, host, self.plan.run_id, job.folder.returned)
