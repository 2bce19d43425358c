"""Supervise a run: watch all hosts at once, and stop all of them at the first failure.

An elastic run goes on after losses, see `regrouping`.

Threads only put what they receive on a queue. The main thread alone takes it from there, decides,
writes and draws. Every host ends in one of three ways: its agent reports that nothing is left, a
second agent cleans up after a lost one, or the host is listed as not verified.
"""

from __future__ import annotations

import queue
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from launcher.output.console import Display, ranges
from launcher.output.log_files import LogFiles
from launcher.output.on_event import EventCommand, EventName
from launcher.run.events import (
    Added,
    Awaited,
    Event,
    Lost,
    Output,
    PeerFailed,
    PeerHangLimit,
    PeerStops,
    Regrouped,
)
from launcher.run.job import Job
from launcher.run.result import Result
from launcher.run.state import RunState
from launcher.supervision.agents import AddedHost, AgentGroup, SilenceDetector
from launcher.supervision.failures import FailureLog
from launcher.supervision.hangs import Hang, HangDetector, find_unprotected
from launcher.supervision.outcome import describe, final_cause, result_of, stopping_line
from launcher.supervision.shutdown import LAST_EVENT_SECONDS, Shutdown
from launcher.supervision.signals import GIVE_WAY, TIME_LIMIT, SignalQueue
from rackrun.terminal import one_line

if TYPE_CHECKING:
    from launcher.supervision.peers import Peers, PeerUpdates
    from launcher.supervision.regrouping import Regrouping

_TURN_SECONDS = 0.1
EVENTS_PER_TURN = 128  # or two per host: ranks report once a second, and a turn looks at all
_GATHER_SECONDS = 0.05  # a turn looks at every host, and hundreds of hosts report all the time
_STACK_SECONDS = 5.0  # for ranks that hang to write their stacks
_PAUSE_SECONDS = 2.0  # between two turns: beyond that, the launcher itself was suspended
_REPEAT_SECONDS = 1.0  # schedulers may send the same signal twice, by two ways
HOW_TO_REPORT = "call report() of rackrun after each step, see docs/howto/own-script.md"


class HostSource(Protocol):
    """Where an elastic run gets more hosts from."""

    def take(self) -> list[AddedHost | str]:
        """Return what was found since the last time: hosts, and lines about other ones."""


class Supervisor:
    """One run, from the first connection to the last verified host."""

    def __init__(
        self,
        job: Job,
        agents: AgentGroup,
        log_files: LogFiles,
        display: Display,
        peers: Peers | None,
        alerts: EventCommand,
        signals: SignalQueue,
        host_source: HostSource | None = None,
    ) -> None:
        """Store the peers that supervise the other hosts, if the run has hosts elsewhere.

        `signals` has those of this process, as long as it is installed. `host_source` has hosts
        that an elastic run is to get.
        """
        self.alerts = alerts
        self.job = job
        self.limits = job.template.limits
        self.agents = agents
        self.log_files = log_files
        self.display = display
        self.now = time.monotonic()
        self.run = RunState(agents.plan, self.now)
        self.failures = FailureLog(self.run, log_files.tail)
        self.peers: PeerUpdates | None = None
        if peers is not None:
            from launcher.supervision.peers import PeerUpdates  # most runs have one launcher

            self.peers = PeerUpdates(peers, self.run, self.failures)
        self.shutdown = Shutdown(self.run, agents, self.limits)
        self.silence = SilenceDetector(self.run, agents, self.limits)
        self.hangs = HangDetector(self.run, agents, self.limits)
        self.regrouping: Regrouping | None = None
        if job.template.elastic:
            from launcher.supervision.regrouping import Regrouping  # most runs are not elastic

            self.regrouping = Regrouping(job, self.run, agents, self.failures, log_files.tail)
        self.signals = signals
        self.host_source = host_source
        self.interrupted = 0
        """The first signal that asked for the end."""
        self.interrupted_at = 0.0
        self.slow: tuple[int, str] | None = None
        """The straggler that was reported last, and why."""
        self.stalled = False
        self.unprotected = False
        """Whether it was reported that some ranks do not report."""

    def supervise(self) -> Result:
        """Run until every host has ended or is declared lost; return the final result."""
        with self.agents.heartbeat(self.limits):
            self.agents.start(self.limits, self.job.template.secrets)
            if self.peers:
                self.peers.listen(self.agents.events)
            while not self.shutdown.is_complete(self.now):
                self._turn()
            # Our failure may only follow from another node's, whose report is on its way.
            while self.peers and self.peers.may_explain(self.now):
                self._turn()
            self.agents.join(self.run.hosts, LAST_EVENT_SECONDS)
        cause = final_cause(self.run, self.failures, self.interrupted)
        return result_of(
            self.job, self.run, cause, self.log_files, bool(self.interrupted), self.now
        )

    def _turn(self) -> None:
        """Handle the events of a turn: record, decide, draw."""
        for event in self._arrivals():
            self._take(event)  # before anything is decided: it may explain why a host is silent
        if refusal := self.log_files.write():
            self.display.note(refusal)
        for problem in self.alerts.problems():
            self.display.note(problem)
        self._advance_clock()
        self._handle_signals()
        for lost in self.silence.lost(self.now, self.shutdown.deadline):
            self._take(lost)
        self._take_in_hosts()
        self._regroup()
        self._report_straggler()
        self._report_unprotected()
        if not self.shutdown.ordered:
            self._evaluate()
        elif self.failures and self.peers:
            self.peers.send_failure(self.now)  # the root cause may have come to light only now
        self.display.draw(self.run, self.now)

    def _arrivals(self) -> list[Event]:
        """Return the events of a moment, after a wait of a tenth of a second at most."""
        events, arrived = self.agents.events, list[Event]()
        most = max(EVENTS_PER_TURN, 2 * len(self.run.hosts))
        with suppress(queue.Empty):
            arrived += events.get_all(_TURN_SECONDS, most)
            until = time.monotonic() + _GATHER_SECONDS
            while len(arrived) < most:
                arrived += events.get_all(max(0.0, until - time.monotonic()), most - len(arrived))
        return arrived

    def _take(self, event: Event) -> None:
        """Log, remember and show one event."""
        match event:
            case PeerFailed():
                self.failures.add(event, self.shutdown.ordered)
                return
            case PeerStops():
                self.signals.add(event.signal)
                return
            case PeerHangLimit():
                assert self.peers is not None  # who else would send it
                self.peers.take(event)
                return
            case Awaited() if not self.shutdown.ordered:
                self._give_way(event)
            case Lost() if self.run.host(event.node).over:
                return  # known already: the launcher has closed that channel itself
            case Output():
                self.log_files.record(event)
        self.run.take(event, self.now)
        if self._is_news(event):
            self.display.show(event)
        if not self._goes_on_after(event):
            self.failures.take(event, self.shutdown.ordered)
        if isinstance(event, Lost):
            self._clean_up_after(event)

    def _is_news(self, event: Event) -> bool:
        """Return False for a refusal by a host that a polite run has left to others."""
        return self.regrouping is None or not self.regrouping.is_still_left(event)

    def _clean_up_after(self, lost: Lost) -> None:
        """End what is left on a host."""
        if self._is_news(lost):
            self._alert("lost", lost.reason, lost.node)
        # An agent that had started nothing needs no second one to clean up after it.
        if swept := self.agents.clean_up(lost.node):
            self.run.take(swept, self.now)

    def _goes_on_after(self, event: Event) -> bool:
        """Return whether an elastic run goes on, although another would end by this event."""
        if self.regrouping is None or self.shutdown.ordered:
            return False
        return self.regrouping.take(event, self.now)

    def _give_way(self, event: Awaited) -> None:
        """Leave the host, if the run is elastic; else stop it, and have its launch queue again."""
        if self.regrouping and self.regrouping.give_way(event.node, event.user, self.now):
            return
        host = self.run.plan.host(event.node).name
        self.display.note(f"{host}: {one_line(event.user)} waits for it")
        self.signals.add(GIVE_WAY)

    def _advance_clock(self) -> None:
        """Set the time of this turn, without the time for which the launcher was suspended.

        Otherwise all hosts would seem silent after a closed laptop lid or a SIGSTOP.
        """
        before, self.now = self.now, time.monotonic()
        if self.now - before > _PAUSE_SECONDS:
            self.run.forgive(self.now - before)

    def _handle_signals(self) -> None:
        """Let the ranks save and end at the first signal; end them at once at the next one."""
        # As any command would end in `| head`: the output has no reader, but ranks may save.
        if self.display.closed and not self.shutdown.ordered:
            self.signals.add(signal.SIGPIPE)
        if self._is_out_of_time and not self.shutdown.ordered:
            self.signals.add(TIME_LIMIT)
        for number in self.signals.take():
            if number == signal.SIGTSTP:
                self.display.note("Ctrl-Z ignored: hosts would end the run when heartbeats stop")
            elif not self.shutdown.ordered:
                self.interrupted, self.interrupted_at = number, self.now
                if self.peers:
                    self.peers.send_stop(number)
                self.display.note(stopping_line(number))
                self._stop(signal.SIGTERM, self.limits.checkpoint_seconds)
            elif number == signal.SIGINT or self.now - self.interrupted_at > _REPEAT_SECONDS:
                self.display.note("killing every process of the run")
                self.shutdown.force(self.now)

    @property
    def _is_out_of_time(self) -> bool:
        limit = self.job.template.time_limit_seconds
        return 0 < limit < self.now - self.run.started_at

    def _evaluate(self) -> None:
        """Order the end of the run when it is done, has failed, or hangs."""
        plan = self.run.plan
        if self.run.succeeded:
            # Every rank has ended well; what one has left behind gets no grace.
            self._stop(signal.SIGKILL, 0)
        elif self.failures:
            self._fail(describe(self.failures.root_cause(), plan))
            self._stop(signal.SIGTERM, self.limits.grace_seconds)
        elif hang := self._hang():
            self.failures.add(hang, after_end=False)
            self._fail(describe(hang, plan))
            # Python's fault handler writes the stacks at SIGABRT; the root cause is read from them.
            self._stop(signal.SIGABRT, _STACK_SECONDS)

    def _hang(self) -> Hang | None:
        """Return a hang; report a stall long before, and when it is over."""
        others = self.peers.exchange_hang_limit(self.limits, self.now) if self.peers else 0.0
        stall = self.hangs.stall(self.now, others)
        if stall and not self.stalled:
            hang, limit = stall
            text = f"{describe(hang, self.run.plan)}; at {limit:.0f} s the run ends"
            self.display.note(text)
            self._alert("stall", text, hang.node, hang.rank)
        elif self.stalled and not stall:
            self.display.note("all ranks make progress again")
        self.stalled = stall is not None
        return self.hangs.hang(self.now)

    def _alert(
        self, event: EventName, text: str, node: int | None, rank: int | None = None
    ) -> None:
        """Run the user's command for an event of this run."""
        host = None if node is None else self.run.plan.host(node).name
        self.alerts.send(event, self.job.folder.path, text, host, rank)

    def _report_unprotected(self) -> None:
        """Report, once, that hangs of ranks that have not reported yet are not detected."""
        if self.unprotected:
            return
        silent = find_unprotected(self.run, self.limits, self.now)
        if silent:
            self.unprotected = True
            whom = "" if len(silent) == len(self.run.ranks) else f" for rank {ranges(silent)}"
            since = f"no report in {self.limits.hang_seconds:.0f} s"
            self.display.note(f"no hang detection{whom}: {since}; {HOW_TO_REPORT}")

    def _fail(self, text: str) -> None:
        """Report a failure at once, as the end may take seconds to confirm."""
        if any(self.run.running):
            self.display.note(f"{text}; stopping all ranks")
        if self.peers:
            self.peers.send_failure(self.now)

    def _stop(self, signum: int, grace_seconds: float) -> None:
        self.shutdown.order(signum, grace_seconds, self.now)

    def _take_in_hosts(self) -> None:
        """Take hosts that were added into an elastic run."""
        if self.host_source is None or self.regrouping is None or self.shutdown.ordered:
            return
        for added in self.host_source.take():
            if isinstance(added, str):
                self.display.note(added)
                continue
            self.agents.add(added)
            self.run.add(added.plan, self.now)
            self.log_files.add(added.plan, self.run.plan)
            self.display.show(Added(added.plan.node, added.plan))
            self.regrouping.add(added.plan.node)

    def _regroup(self) -> None:
        """Replace the group of an elastic run where that is due, and show why."""
        if self.regrouping is None or self.shutdown.ordered:
            return
        for news in self.regrouping.advance(self.now):
            if isinstance(news, Regrouped):
                self.display.show(news)
            else:
                self.display.note(news.text)
                if news.event:
                    self._alert(news.event, news.text, news.node, news.rank)

    def _report_straggler(self) -> None:
        """Report which rank delays the others, once for each rank and reason."""
        slow = self.run.slow
        before, self.slow = self.slow, (slow.rank, slow.why) if slow else None
        if slow and self.slow != before:
            host = self.run.slow_host
            who = f"{host.plan.name} is slow: " if host else ""
            if host:
                self.run.incidents.add(host.plan.name, "slow", slow.text)
            self.display.note(f"{who}{one_line(slow.text)}")
