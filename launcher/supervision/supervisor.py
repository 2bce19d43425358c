"""Supervise a run: watch all hosts at once, and stop all of them at the first failure.

Threads only put what they receive on a queue. The main thread alone takes it from there, decides,
writes and draws. Every host ends in one of three ways: its agent reports that nothing is left, a
second agent cleans up after a lost one, or the host is listed as not verified.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from rackrun.launcher.output.on_event import EventName
from rackrun.launcher.output.run_output import RunOutput
from rackrun.launcher.run.events import (
    Event,
    Lost,
    PeerEvent,
    PeerFailed,
    PeerHangLimit,
    PeerStops,
)
from rackrun.launcher.run.host_names import grouped, ranges
from rackrun.launcher.run.job import Job
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.state import RunState
from rackrun.launcher.supervision.agents import AgentGroup, SilenceDetector
from rackrun.launcher.supervision.hangs import (
    Hang,
    HangDetector,
    find_unreporting,
    longest_hang_limit,
)
from rackrun.launcher.supervision.outcome import describe, final_cause, result_of, stopping_line
from rackrun.launcher.supervision.root_cause import Cause, FailureLog
from rackrun.launcher.supervision.shutdown import LAST_EVENT_SECONDS, Shutdown
from rackrun.launcher.supervision.signals import STOP_SIGNAL, TAKE_IN, TIME_LIMIT, SignalQueue
from rackrun.terminal import one_line

if TYPE_CHECKING:
    from rackrun.launcher.supervision.peers import Peers

GRACE_SECONDS = 5.0  # for ranks between SIGTERM and SIGKILL when a run has failed
_TURN_SECONDS = 0.1
EVENTS_PER_TURN = 128  # or two per host: ranks report once a second, and a turn looks at all
_GATHER_SECONDS = 0.05  # a turn looks at every host, and hundreds of hosts report all the time
_STACK_SECONDS = 5.0  # for ranks that hang to write their stacks
_PAUSE_SECONDS = 2.0  # between two turns: beyond that, the launcher itself was suspended
_REPEAT_SECONDS = 1.0  # an order to stop may come twice, by two ways
_READER_SECONDS = 1.0  # a terminal that hangs up ends `| tee` first, and lets the run go on then
HOW_TO_REPORT = (
    "call report() of rackrun after each step, see docs/guides/own-script.md, or type"
    " --silent-minutes 30 if it prints more often"
)


class Supervisor:
    """One run, from the first connection to the last verified host."""

    def __init__(
        self,
        job: Job,
        agents: AgentGroup,
        output: RunOutput,
        peers: Peers | None,
        signals: SignalQueue,
        fit_again: Callable[[], Collection[str]] | None = None,
        is_followed: Callable[[Result], bool] | None = None,
    ) -> None:
        """Start nothing yet.

        `peers` supervise the other hosts, if the run has hosts elsewhere. `signals` has those of
        this process, as long as it is installed. `fit_again` returns the lost hosts that could take
        part again; if there are any at the end of an epoch, all ranks save and end. `is_followed`
        says whether another attempt follows a result: then silent hosts are not waited for.
        """
        self.job = job
        self.limits = job.options.limits
        self.agents = agents
        self.output = output
        self.now = time.monotonic()
        self.run = RunState(agents.plan, self.now)
        self.failures = FailureLog(self.run, output.logs.tail)
        self.peers = peers
        self.shutdown = Shutdown(self.run, agents, self.limits)
        self.silence = SilenceDetector(self.run, agents, self.limits)
        self.hangs = HangDetector(self.run, agents, self.limits)
        self.signals = signals
        self.fit_again = fit_again
        self.is_followed = is_followed
        self.epoch = 0
        """In which the first rank was last seen."""
        self.interrupted = 0
        """The first signal that asked for the end."""
        self.interrupted_at = 0.0
        self.expects_ctrl_c = False
        """Another node told of a Ctrl-C that has not reached this one."""
        self.read_at = self.now
        """When the output was last seen to have a reader."""
        self.slow: tuple[int, str] | None = None
        """The straggler that was reported last, and why."""
        self.stalled = False
        self.unreporting_noted = False
        """Whether it was reported that some ranks do not report."""

    def supervise(self) -> Result:
        """Run until every host has ended or is declared lost; return the final result."""
        with self.agents.heartbeat(self.limits):
            self.agents.start(self.limits, self.job.options.secrets)
            if self.peers:
                self.peers.listen(self.agents.events)
            while not (self.shutdown.is_complete(self.now) or self._is_left_to_next_attempt()):
                self._turn()
            # Our failure may only follow from another node's, whose report is on its way.
            while self.peers and self.peers.may_explain(self.failures, self.now):
                self._turn()
            self.agents.join(self.run.hosts, LAST_EVENT_SECONDS)
        if self.interrupted == TAKE_IN and self.run.succeeded:
            self.interrupted = 0  # it was done before the order arrived
        return self._result()

    def _is_left_to_next_attempt(self) -> bool:
        return (
            self.is_followed is not None
            and self.shutdown.waits_for_silence(self.now)
            and self.is_followed(self._result())
        )

    def _result(self) -> Result:
        cause = final_cause(self.run, self.failures, self.interrupted)
        logs, is_interrupted = self.output.logs, bool(self.interrupted)
        return result_of(self.job, self.run, cause, logs, is_interrupted, self.now)

    def _turn(self) -> None:
        """Record the events of a moment, decide what follows from them, and draw."""
        for event in self._arrivals():
            self._take(event)  # before anything is decided: it may explain why a host is silent
        self.output.write_logs()
        before, self.now = self.now, time.monotonic()
        if self.now - before > _PAUSE_SECONDS:
            # After a closed laptop lid or a SIGSTOP of ours, all hosts would seem silent.
            self.run.forgive(self.now - before)
        self._handle_signals()
        for lost in self.silence.lost(self.now, self.shutdown.deadline):
            self._take(lost)
        self._report_straggler()
        self._report_unreporting()
        if not self.shutdown.ordered:
            self._end_if_due()
        elif self.failures and self.peers:
            # The root cause may have come to light only now.
            self.peers.send_failure(self.failures, self.now)
        self.output.draw(self.run, self.now)

    # -- events

    def _arrivals(self) -> list[Event]:
        """Return the events of a moment, after a wait of a tenth of a second at most."""
        events, arrived = self.agents.events, list[Event]()
        most = max(EVENTS_PER_TURN, 2 * len(self.run.hosts))
        with suppress(queue.Empty):
            arrived.append(events.get(timeout=_TURN_SECONDS))
            until = time.monotonic() + _GATHER_SECONDS
            while len(arrived) < most:
                arrived.append(events.get(timeout=max(0.0, until - time.monotonic())))
        return arrived

    def _take(self, event: Event) -> None:
        """Log, remember and show one event."""
        match event:
            case PeerFailed() | PeerStops() | PeerHangLimit():
                self._take_from_peer(event)
                return  # it is about no host of ours
            case Lost() if self.run.host(event.node).over:
                return  # known already: the launcher has closed that channel itself
        self.run.take(event, self.now)
        self.output.take(event)
        self.failures.take(event, self.shutdown.ordered)
        if isinstance(event, Lost):
            self._alert("lost", event.reason, event.node)
            self._clean_up(event.node)

    def _clean_up(self, node: int) -> None:
        # An agent that had started nothing needs no second one to clean up after it.
        if swept := self.agents.clean_up(node):
            self.run.take(swept, self.now)

    def _take_from_peer(self, event: PeerEvent) -> None:
        match event:
            case PeerFailed():
                self.failures.add(event, self.shutdown.ordered)
            case PeerStops():
                # A scheduler sends one Ctrl-C to every node: the other's is ours, whichever of
                # them is here first, and no second one.
                if not self.signals.ask_for_end:
                    self.expects_ctrl_c = event.signal == signal.SIGINT
                    self.signals.add(event.signal)
            case PeerHangLimit():
                assert self.peers is not None  # who else would send it
                self.peers.take_hang_limit(event)

    # -- decisions

    def _handle_signals(self) -> None:
        """Let the ranks save and end at the first signal; end them at once at the next one."""
        limit = self.job.seconds_left
        if not self.shutdown.ordered:
            # As any command would end in `| head`: the output has no reader, but ranks may save.
            if not self.output.closed:
                self.read_at = self.now
            elif self.now - self.read_at > _READER_SECONDS:
                self.signals.add(signal.SIGPIPE)
            if 0 < limit < self.now - self.run.started_at:
                self.signals.add(TIME_LIMIT)
        for number in self.signals.take():
            if number == signal.SIGTSTP:
                self.output.note("Ctrl-Z ignored: hosts would end the run when heartbeats stop")
            elif not self.shutdown.ordered or self.interrupted == TAKE_IN:
                if self.peers:
                    self.peers.send_stop(number)
                self._interrupt(number, stopping_line(number))
            elif number == signal.SIGINT or (
                number == STOP_SIGNAL and self.now - self.interrupted_at > _REPEAT_SECONDS
            ):  # TERM comes from whatever ends a machine or a job, to each process and repeatedly
                self._force(number)

    def _force(self, number: int) -> None:
        if number == signal.SIGINT and self.expects_ctrl_c:
            self.expects_ctrl_c = False
            return
        self.output.note("killing every process of the run")
        self.shutdown.force(self.now)

    def _interrupt(self, number: int, line: str) -> None:
        self.interrupted, self.interrupted_at = number, self.now
        self.output.note(line)
        self.shutdown.order(signal.SIGTERM, self.limits.checkpoint_seconds, self.now)

    def _end_if_due(self) -> None:
        """Order the end of the run when it is done, has failed, or hangs."""
        if self.run.succeeded:
            # Every rank has ended well; what one has left behind gets no grace.
            self.shutdown.order(signal.SIGKILL, 0, self.now)
        elif self.failures:
            self._fail(self.failures.root_cause())
            self.shutdown.order(signal.SIGTERM, GRACE_SECONDS, self.now)
        elif hang := self._hang():
            self.failures.add(hang, after_end=False)
            self._fail(hang)
            # Python's fault handler writes the stacks at SIGABRT; the root cause is read from them.
            self.shutdown.order(signal.SIGABRT, _STACK_SECONDS, self.now)
        elif self.fit_again is not None:
            self._take_hosts_in(self.fit_again)

    def _take_hosts_in(self, fit_again: Callable[[], Collection[str]]) -> None:
        """Interrupt the run at the end of an epoch if lost hosts could take part again."""
        before, self.epoch = self.epoch, self.run.lead.fields.get("epoch", self.epoch)
        if 0 < before < self.epoch and (hosts := fit_again()):
            line = f"{grouped(sorted(hosts))} can take part again: ranks save and start again"
            self._interrupt(TAKE_IN, line)

    def _hang(self) -> Hang | None:
        """Return a hang; report a stall long before, and when it is over."""
        others_limit = 0.0
        if self.peers:
            # Ranks here may wait for one of another node that saves, and the other way round.
            self.peers.send_hang_limit(longest_hang_limit(self.run, self.limits, self.now))
            others_limit = self.peers.hang_limit
        stall = self.hangs.stall(self.now, others_limit)
        if stall and not self.stalled:
            hang, limit = stall
            text = f"{describe(hang, self.run.plan)}; at {limit:.0f} s the run ends"
            self.output.note(text)
            self._alert("stall", text, hang.node, hang.rank)
        elif self.stalled and not stall:
            self.output.note("all ranks make progress again")
        self.stalled = stall is not None
        return self.hangs.hang(self.now)

    def _fail(self, cause: Cause | Hang) -> None:
        """Report a failure at once, as the end may take seconds to confirm."""
        if any(self.run.running):
            self.output.note(f"{describe(cause, self.run.plan)}; stopping all ranks")
        if self.peers:
            self.peers.send_failure(self.failures, self.now)

    # -- reports for the user

    def _alert(
        self, event: EventName, text: str, node: int | None, rank: int | None = None
    ) -> None:
        """Run the user's command for an event of this run."""
        host = None if node is None else self.run.plan.host(node).name
        self.output.event_command.send(event, text, host, rank)

    def _report_straggler(self) -> None:
        """Report which rank delays the others, once for each rank and reason."""
        slow = self.run.slow
        before, self.slow = self.slow, (slow.rank, slow.why) if slow else None
        if slow and self.slow != before:
            host = self.run.slow_host
            who = f"{host.plan.name} is slow: " if host else ""
            self.output.note(f"{who}{one_line(slow.text)}")

    def _report_unreporting(self) -> None:
        """Report, once, that hangs of ranks that have not reported yet are not detected."""
        if self.unreporting_noted or self.limits.silent_minutes:
            return
        silent = find_unreporting(self.run, self.limits, self.now)
        if silent:
            self.unreporting_noted = True
            whom = "" if len(silent) == len(self.run.ranks) else f" for rank {ranges(silent)}"
            since = f"no report in {self.limits.hang_seconds:.0f} s"
            self.output.note(f"no hang detection{whom}: {since}; {HOW_TO_REPORT}")
