"""A run on hosts that are already reached: check them, plan, run; again after a failure.

    result = Attempts(spec, start_reader).run()

All attempts have one run folder. The transports lead over SSH, or to this machine.
"""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import replace

from rackrun.commands import called
from rackrun.errors import Problem
from rackrun.launcher.errors import HostError
from rackrun.launcher.files.download import fetch_run, left_behind
from rackrun.launcher.lifecycle.attempt import Attempt, supervise
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.lost_hosts import LostHosts
from rackrun.launcher.lifecycle.planning import environment_lines, plan_for, preflight, refuse_ranks
from rackrun.launcher.lifecycle.restart_policy import RestartState, with_earlier_attempts
from rackrun.launcher.output.console import last_line, say
from rackrun.launcher.output.log_files import write_result
from rackrun.launcher.output.run_output import RunOutput, StartReader
from rackrun.launcher.preflight.facts import NO_FACTS, ClusterFacts
from rackrun.launcher.run.job import Job, TaskWork
from rackrun.launcher.run.result import Result
from rackrun.launcher.supervision.signals import STOP_SIGNAL, SignalQueue
from rackrun.runs import SHORT_ID
from rackrun.signals import ended_by_a_signal

CUT_OFF_SECONDS = 1800.0
RECONNECT_SECONDS = 5.0  # between two tries


class Attempts:
    """All attempts of a launch: what they share, and how the newest one ended."""

    def __init__(self, spec: LaunchSpec, start_reader: StartReader) -> None:
        """Take the spec of all attempts, whose probes hold the hosts for the first one.

        `start_reader` is called when the run has a plan.
        """
        self.spec = spec
        self._start_reader = start_reader
        self._newest: Attempt | None = None
        self._stack = ExitStack()
        self._lost_hosts = LostHosts(spec)
        self._output: RunOutput | None = None
        """The output of the run, from its first attempt on."""
        self.result: Result | None = None
        """The result of the newest attempt."""
        self._is_over = False
        """The result is written, and no further attempt follows."""
        self._began = 0.0
        """When the first attempt began: the time limit counts from there on."""
        self._cut_off_until = 0.0
        """Until when hosts that were all lost at once are tried again."""
        self._uncounted_from = 0.0
        """From when on such a loss costs no restart; the run itself may bring all hosts down."""
        self._signals = SignalQueue()

    @property
    def _running_output(self) -> RunOutput:
        assert self._output is not None
        return self._output

    @property
    def final(self) -> Result:
        """The result of the newest attempt, once there is one."""
        assert self.result is not None
        return self.result

    def run(self) -> Result:
        """Make attempts until one succeeds or no further one is allowed; return the last result.

        Raises HostError when the hosts are not fit for the first attempt.
        """
        with self._lost_hosts, ExitStack() as self._stack:
            try:
                with ended_by_a_signal(STOP_SIGNAL):
                    self._make_attempts()
            except KeyboardInterrupt as interrupt:
                if self.result is not None and not self._is_over:
                    self.result = _between_attempts(self.result, interrupt)
                    self.result = self._lost_hosts.verified(self.result)
                    self._say(last_line(self.result))
                raise
            finally:
                if self._output is not None and self.result is not None:
                    if not self._is_over:
                        self._output.note(write_result(self._output.folder, self.result))
                    self._output.end(self.result)
        return self.final

    def _make_attempts(self) -> None:
        state: RestartState | None = self.spec.restart_state
        while state is not None:
            current = state
            try:
                state = self._make_attempt(current)
            except HostError as error:
                if self.result is None or not error.hosts:
                    raise
                if not self._is_still_cut_off(current, error):
                    state = self._without(current, error)
        if not self._is_over:
            self._end()

    # -- an attempt

    def _make_attempt(self, state: RestartState) -> RestartState | None:
        """Make an attempt; return the state for the next one, None when there is to be none."""
        active, is_first = state.active(), self._newest is None
        hosts = state.hosts if is_first else active  # an unfit spare is reported at once
        transport_of = dict(zip(self.spec.hosts, self.spec.reached, strict=True))
        transports = [transport_of[host] for host in hosts]
        spec = replace(self.spec, hosts=hosts, transports=transports)
        self.spec = replace(self.spec, probed=NO_FACTS)  # this attempt takes its probes over
        with preflight(spec, self._say, is_restart=not is_first) as all_hosts:
            cluster = all_hosts.first(len(active))
            if is_first:
                refuse_ranks(cluster)
                for line in environment_lines(cluster):
                    self._say(line)
            job = self._next_job()
            plan = plan_for(job, cluster)
            earlier, attempt = self.result, Attempt(job, plan, transports[: len(active)])
            if self._output is None:
                self._output = self._stack.enter_context(RunOutput(job, self._start_reader))
            self._newest, output = attempt, self._output
            result = self._supervised(attempt, cluster, state)
            state = state.with_returned(self._lost_hosts.fit())
            following = self._following(state, result, earlier)
            if following is None:
                self._end()
            else:
                self._lost_hosts.add(attempt.hosts, result)
                if following.active()[0] != active[0]:
                    output.note(self._fetched(attempt))
            output.note_result(self.final, is_last=following is None)
        if following is not None and following.restarts > state.restarts:
            self._announce_restart(following, output)
        return following

    def _announce_restart(self, following: RestartState, output: RunOutput) -> None:
        line = f"restart {following.restarts} of {following.max_restarts}"
        self.spec = replace(self.spec, turn="")  # before launches that wait
        output.note(line)
        output.events.write("restart", number=following.restarts)
        text = f"{line}; {last_line(replace(self.final, advice=''))}"
        output.event_command.send("restart", text, self.final.host, self.final.rank)

    def _supervised(self, attempt: Attempt, cluster: ClusterFacts, state: RestartState) -> Result:
        active = [host.name for host in attempt.plan.hosts]
        self._lost_hosts.check(self.spec, state.awaited, active)
        # Only a task continues where it was: a command would begin anew.
        takes_hosts_in = state.is_short and isinstance(self.spec.work, TaskWork)
        with self._signals.installed():  # until there is a result, none may interrupt
            result = supervise(
                *(attempt, self._running_output, self._signals),
                probes=cluster.probes,
                versions=cluster.versions,
                fit_again=self._lost_hosts.fit if takes_hosts_in else None,
                is_followed=lambda result: self._is_followed(state, result),
            )
            self.result = result.with_attempts(self.result)
        return result

    def _next_job(self) -> Job:
        if self._newest is None:
            job = self.spec.job(self.spec.new_folder())
        else:
            job = self._newest.job.again()
            earlier = str(self.spec.options.runs / job.folder.path.name)
            job = replace(job, work=with_earlier_attempts(self.spec.work, earlier))
        return replace(job, seconds_left=self._seconds_left())

    def _say(self, text: str) -> None:
        if self._output is not None:
            self._output.note(text)
        else:
            say(text)

    def _seconds_left(self) -> float:
        self._began = self._began or time.monotonic()
        limit = self.spec.options.time_limit_seconds
        # At least a second, as 0 means no limit: an attempt that is too late ends at once.
        return max(1.0, limit - (time.monotonic() - self._began)) if limit else 0.0

    # -- after an attempt

    def _is_followed(self, state: RestartState, result: Result) -> bool:
        return not self._signals.ask_for_end and state.after(result) is not None

    def _with_list_read_again(self, state: RestartState) -> RestartState:
        """Return the state for the list of hosts as it is now."""
        if self.spec.with_added_hosts is None or not state.max_restarts:
            return state
        try:
            self.spec, hosts = self.spec.with_added_hosts(self.spec)
            self.spec.write_into(self._running_output.folder)
        except Problem as error:
            self._say(f"the list of hosts stays as it was: {error}")
            return state
        return state.with_listed(hosts)

    def _following(
        self, state: RestartState, result: Result, earlier: Result | None
    ) -> RestartState | None:
        """Return the state for the attempt that follows this result; None when none follows."""
        following: RestartState | None
        now = time.monotonic()
        if result.verdict == "failed" or result.was_ended_for_hosts:
            state = self._with_list_read_again(state)
        if result.port_was_taken and not (earlier and earlier.port_was_taken):
            following = state  # until it is bound, any program can take it
        elif result.was_ended_for_hosts:
            following = state
        elif result.was_cut_off and state.max_restarts and now >= self._uncounted_from:
            following = state  # its hosts are not to blame
            self._cut_off_until, self._uncounted_from = now + CUT_OFF_SECONDS, now + CUT_OFF_SECONDS
            self._say(f"trying for {CUT_OFF_SECONDS / 60:g} minutes to reach the hosts again")
        else:
            following = state.after(result)
        if following and self._signals.ask_for_end:
            self._say("no further attempt: the run is being stopped")
            return None
        return following

    def _is_still_cut_off(self, state: RestartState, error: HostError) -> bool:
        """Return True, after a moment, if no host can be reached as long as our own link is down.

        Some hosts may be reached a moment before the others.
        """
        if not self.final.was_cut_off or time.monotonic() > self._cut_off_until:
            return False
        if error.hosts < {host.label for host in state.active()}:
            self._cut_off_until = 0.0
        time.sleep(RECONNECT_SECONDS)
        return True

    def _without(self, state: RestartState, error: HostError) -> RestartState | None:
        for line in str(error).splitlines():
            self._say(f"left out: {line}")
        following = state.without(error.hosts)
        if following is None:
            self._say(f"too few hosts are left; {last_line(self.final)}")
        return following

    def _fetched(self, attempt: Attempt) -> str:
        """Fetch what the hosts have of the run; return that. A signal raises KeyboardInterrupt."""
        if self.spec.is_here:
            return ""
        with ended_by_a_signal():
            return fetch_run(attempt.hosts, attempt.job, self.final, self._running_output.note)

    def _end(self) -> None:
        """Write how the run ended, and fetch its results."""
        assert self._newest is not None
        self._is_over, note = True, self._running_output.note
        with suppress(KeyboardInterrupt), ended_by_a_signal():
            self.result = self._lost_hosts.verified(self.final)
        note(write_result(self._newest.job.folder, self.final))
        try:
            note(self._fetched(self._newest))
        except KeyboardInterrupt:
            note(f"not waited for: {left_behind(self._newest.plan.hosts[0])}")
        if doubtful := [name for name, end in self.final.hosts.items() if end != "clean"]:
            run = self._newest.plan.run_id[:SHORT_ID]
            note(f"once {', '.join(doubtful)} can be reached, type: {called('stop')} {run}")


def _between_attempts(result: Result, interrupt: KeyboardInterrupt) -> Result:
    number = int(interrupt.args[0]) if interrupt.args else signal.SIGINT
    cause = "stopped between two attempts"
    ended = replace(result, verdict="interrupted", exit_code=128 + number, cause=cause)
    return replace(ended, host=None, rank=None, log=None, traceback="")
