"""Runs a plan: all hosts at once, all of them stopped at the first trouble, and the cause named.

Threads only report: what they say lies on one queue, and the main thread alone takes it from there,
decides, writes and draws. Every host ends in one of three ways: its agent says that nothing is
left, a second agent has looked after the first one was lost, or it is named as not verified.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from launcher.output.console import Screen
from launcher.output.log_files import LogFiles
from launcher.remote.agent import KILL_SECONDS
from launcher.run.events import (
    AskedToStop,
    Closed,
    Event,
    Lost,
    Output,
    PeerFailed,
    PeerPatience,
    PeerStops,
    RankEnded,
    Stopping,
    Swept,
    TorchrunEnded,
)
from launcher.run.job import Job, TaskWork
from launcher.run.plan import Plan
from launcher.run.result import Result, moved
from launcher.run.state import HostState, RunState
from launcher.supervision import hangs
from launcher.supervision.agent_client import AgentClient, EventQueue, Heartbeat
from launcher.supervision.agent_protocol import reach_order, stop_order
from launcher.supervision.peers import Peers
from launcher.supervision.root_cause import LOST, Cause, Trouble, first_cause, is_own, is_secondary
from launcher.transport.base import Transport
from rackrun.terminal import one_line

TURN_SECONDS = 0.1
EVENTS_PER_TURN = 128
GATHER_SECONDS = 0.05  # a turn looks at every host, and hundreds of hosts speak all the time
INBOX_EVENTS = 128  # of 64 KiB at most: then the readers wait, and so do the hosts
STACK_SECONDS = 5.0  # for ranks that hang to write down where
SWEEP_SECONDS = 30.0  # for a second agent to end what the first one left
FORCED_SECONDS = 4.5  # for all of that, when somebody does not want to wait
CONFIRM_SECONDS = 3.0  # of these for the first agent
CONNECT_SECONDS = 4.5  # for it to say a word, where the first one was silent
REACH_SECONDS = 2.0  # for hosts to answer one another, when none of them gets further
LAST_WORD_SECONDS = 5.0
PAUSE_SECONDS = 2.0  # between two turns: more than that, and the launcher itself stood still

REPORTED = ("accuracy", "loss", "images_per_second", "epoch", "step", "final", "report", "speed")

TWICE_SECONDS = 1.0  # schedulers may send the same signal twice, by two ways
PEERS_SECONDS = 5.0  # for another node to tell of the failure that ours followed from

STOP_SIGNAL = signal.SIGUSR2  # what `./run-ssh stop` sends the keeper of a detached run
KEPT = (signal.SIGINT, signal.SIGHUP)
"""Where whoever started us ignores one of these, as `nohup` and `trap '' INT` do, so do we."""

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, STOP_SIGNAL, signal.SIGTSTP)


class Supervisor:
    """One run, from the first connection to the last verified host."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        places: Sequence[Transport],
        journal: LogFiles,
        screen: Screen,
        peers: Peers | None = None,
    ) -> None:
        """The places are those of the plan's hosts, in its order; peers look after others."""
        self.job = job
        self.journal = journal
        self.screen = screen
        self.peers = peers
        self.peer_patience: dict[int, float] = {}
        """For how long the ranks of other nodes may stand still, by node."""
        self.inbox: EventQueue = queue.Queue(INBOX_EVENTS)
        self.links = [
            AgentClient(place, host, self.inbox)
            for place, host in zip(places, plan.hosts, strict=True)
        ]
        self.now = time.monotonic()
        self.run = RunState(plan, self.now)
        self.troubles: list[Trouble] = []
        self.aftermath: list[Trouble] = []
        """The troubles since the end was ordered."""
        self.signals: deque[int] = deque()
        self.interrupted = 0
        """The first signal that asked for the end."""
        self.interrupted_at = 0.0
        self.failed_at = 0.0
        self.forced_at: float | None = None
        """When somebody has said that every process is to be killed at once."""
        self.ending: float | None = None
        """When every host must have said its last word; None while the run goes on."""
        self.awake_at = self.now
        self.slow: tuple[int, str] | None = None
        """Who was said last to hold up the others, and why."""
        self.asked_at: float | None = None
        """When the hosts were asked whether they reach each other."""

    def supervise(self) -> Result:
        """Run until every host is done with."""
        limits = self.job.limits
        with self.hearing_signals(), Heartbeat(self.links, limits.lease_seconds / 3):
            for link in self.links:
                link.start(limits, self.job.secrets)
            if self.peers:
                self.peers.listen(self.inbox)
            while not self.over or self.may_hear_why:
                self.turn()
            for link, host in zip(self.links, self.run.hosts, strict=True):
                link.finish(LAST_WORD_SECONDS if host.closed else 0)
        return self.result()

    def turn(self) -> None:
        """Take in what has happened, decide, show."""
        for event in self.arrivals():
            self.take(event)
        if refusal := self.journal.write():
            self.screen.note(refusal)
        self.tell_time()
        self.heed_signals()
        self.lose_silent_hosts()
        self.tell_slow()
        if self.ending is None:
            self.judge()
        elif self.troubles:
            self.tell_peers()  # the true cause may have come to light only now
        self.screen.draw(self.run, self.now)

    # -- what comes in

    def arrivals(self) -> Iterator[Event]:
        """What comes within a moment, after a wait of a tenth of a second at most."""
        try:
            yield self.inbox.get(timeout=TURN_SECONDS)
            until = time.monotonic() + GATHER_SECONDS
            for _ in range(EVENTS_PER_TURN):
                yield self.inbox.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return

    def take(self, event: Event) -> None:
        """Write down, remember and show one event."""
        if isinstance(event, PeerFailed | PeerStops | PeerPatience):
            self.take_from_peer(event)
            return
        if isinstance(event, Lost) and self.run.host(event.node).over:
            return  # known already: the launcher has closed that channel itself
        if isinstance(event, Output):
            self.journal.record(event)
        self.run.take(event, self.now)
        self.screen.show(event)
        if isinstance(event, Lost | Stopping | TorchrunEnded | AskedToStop | RankEnded):
            self.take_trouble(event)
        elif isinstance(event, Closed) and self.ending is None:
            self.take_last_word(event)
        if isinstance(event, Lost):
            self.look_after(event.node)

    def take_from_peer(self, event: PeerFailed | PeerStops | PeerPatience) -> None:
        """Another node has something to say."""
        match event:
            case PeerFailed():
                (self.troubles if self.ending is None else self.aftermath).append(event)
            case PeerStops():
                self.signals.append(event.signal)
            case PeerPatience():
                self.peer_patience[event.node] = event.seconds

    def take_trouble(
        self, event: Lost | Stopping | TorchrunEnded | AskedToStop | RankEnded
    ) -> None:
        """Remember what may be why the run ends; an end that is in order is no trouble."""
        if isinstance(event, RankEnded) and event.exit_code == 0:
            return
        ranks = self.run.ranks_of(event.node)
        if isinstance(event, TorchrunEnded) and all(rank.ended for rank in ranks):
            return
        (self.troubles if self.ending is None else self.aftermath).append(event)

    def take_last_word(self, event: Closed) -> None:
        """An agent that was not told to end says why it does, or is not believed."""
        told = any(
            not isinstance(trouble, PeerFailed) and trouble.node == event.node
            for trouble in self.troubles
        )
        if not told and any(rank.ended is None for rank in self.run.ranks_of(event.node)):
            self.troubles.append(Lost(event.node, "its agent ended before its ranks did"))

    def look_after(self, node: int) -> None:
        """Somebody else has to see to what a lost agent left, if it had started anything."""
        link = self.link(node)
        if link.channel is None:
            reason = "the agent was just being started" if link.opening else ""
            self.run.take(Swept(node, reason=reason), self.now)
        else:
            link.sweep()

    def link(self, node: int) -> AgentClient:
        """The link to the host with this node rank."""
        return self.links[node - self.run.plan.hosts[0].node]

    # -- decisions

    def tell_time(self) -> None:
        """What stood still while the launcher itself did (laptop lid, SIGSTOP) is not to blame."""
        before, self.now = self.now, time.monotonic()
        if self.now - before > PAUSE_SECONDS:
            self.awake_at = self.now
            self.run.forgive(self.now - before)

    def heed_signals(self) -> None:
        """The first one asks the ranks to save and end; any further one ends them at once."""
        if self.screen.gone and self.ending is None:
            self.signals.append(signal.SIGPIPE)
        while self.signals:
            number = self.signals.popleft()
            if number == signal.SIGTSTP:
                self.screen.note("not stopped: hosts end a run whose launcher stands still")
            elif self.ending is None:
                self.interrupted, self.interrupted_at = number, self.now
                if self.peers:
                    self.peers.tell_stop(number)
                self.screen.note("stopping, Ctrl-C again to force")
                self.stop(signal.SIGTERM, self.job.limits.checkpoint_seconds)
            elif number == signal.SIGINT or self.now - self.interrupted_at > TWICE_SECONDS:
                self.screen.note("killing every process of the run")
                self.force()

    def force(self) -> None:
        """Have everything killed, and wait no longer than somebody would who types Ctrl-C twice."""
        self.forced_at = self.forced_at or self.now
        self.stop(signal.SIGKILL, 0)
        self.ending = self.forced_at + CONFIRM_SECONDS

    def lose_silent_hosts(self) -> None:
        """A host is lost when nothing is heard of it for its lease; or at all, at the start."""
        limits = self.job.limits
        for host, link in zip(self.run.hosts, self.links, strict=True):
            silent = 0.0 if link.holding else self.now - max(link.heard_at, self.awake_at)
            if host.over:
                continue
            if host.opened_at is None and self.now - self.run.started_at > limits.start_seconds:
                self.lose(host, f"no agent answered within {limits.start_seconds:g} s")
            elif host.opened_at is not None and silent > limits.lease_seconds:
                self.lose(host, f"silent for {silent:.0f} s")
            elif self.ending is not None and self.now > self.ending:
                self.lose(host, "did not confirm its end")

    def lose(self, host: HostState, reason: str) -> None:
        """Give up on the agent of a host."""
        self.take(Lost(host.plan.node, reason))

    def judge(self) -> None:
        """While the run goes on: whether it is done, has failed, or hangs."""
        if self.run.succeeded:
            self.stop(signal.SIGKILL, 0)
        elif self.troubles:
            self.announce_failure(first_cause(self.troubles, self.aftermath, self.journal.tail))
            self.tell_peers()
            self.stop(signal.SIGTERM, self.job.limits.grace_seconds)
        elif hang := self.find_hang():
            if not self.network_is_known():
                return
            hang = hangs.split_network(hang, self.run)
            self.troubles.append(hang)
            self.announce_failure(hang)
            self.tell_peers()
            self.stop(signal.SIGABRT, STACK_SECONDS)  # Python's fault handler writes the stacks
        else:
            self.asked_at = None  # the next hang asks anew

    def find_hang(self) -> hangs.Hang | None:
        """Whoever keeps the ranks from starting, or from getting further."""
        limits, others = self.job.limits, self.others_patience()
        return hangs.find_absent(self.run, limits, self.now) or hangs.find_hang(
            self.run, limits, self.now, others
        )

    def tell_slow(self) -> None:
        """Say who holds up the others, once for each rank and reason; the run goes on."""
        slow = self.run.slow
        told, self.slow = self.slow, (slow.rank, slow.why) if slow else None
        if slow and self.slow != told:
            host = self.run.slow_host
            who = f"{host.plan.name} is slow: " if host else ""
            self.screen.note(f"{who}{one_line(slow.text)}")

    def others_patience(self) -> float:
        """For how long the ranks of other nodes may stand still; they hear the same of ours."""
        if self.peers:
            self.peers.tell_patience(hangs.longest_patience(self.run, self.job.limits))
        return max(self.peer_patience.values(), default=0.0)

    def tell_peers(self) -> None:
        """Let the other nodes end as well, with our cause; again only if it is a truer one."""
        self.failed_at = self.failed_at or self.now
        if not self.peers:
            return
        cause = first_cause(self.troubles, self.aftermath, self.journal.tail)
        if cause.node is not None:  # else it is a node that has told us
            who = "" if cause.rank is None else f"rank {cause.rank}: "
            self.peers.tell_failure(who + one_line(cause.text), cause.exit_code, self.follows)

    @property
    def follows(self) -> bool:
        """Whether our failure is probably the consequence of another node's."""
        tail = self.journal.tail
        return all(is_secondary(trouble, tail) for trouble in self.troubles) and not any(
            is_own(trouble, tail) for trouble in self.aftermath
        )

    @property
    def may_hear_why(self) -> bool:
        """Whether another node may soon tell what our own failure followed from."""
        if not self.peers or not self.troubles or self.now - self.failed_at > PEERS_SECONDS:
            return False
        return self.follows

    def network_is_known(self) -> bool:
        """Whether all hosts have told which of the others they reach; asks them to."""
        if self.asked_at is None:
            self.asked_at = self.now
            doors = [(host.plan.address, host.door) for host in self.run.hosts if host.door]
            for link, host in zip(self.links, self.run.hosts, strict=True):
                others = [door for door in doors if door[0] != host.plan.address]
                host.unreached = None
                link.tell(reach_order(others, REACH_SECONDS))
        known = all(host.unreached or host.over for host in self.run.hosts)
        return known or self.now - self.asked_at > 2 * REACH_SECONDS

    def announce_failure(self, cause: Cause | hangs.Hang) -> None:
        """Say at once what the end may take seconds to confirm, if anything still has to end."""
        if any(self.run.running):
            self.screen.note(f"{self.whereabouts(cause)}{one_line(cause.text)}; stopping all ranks")

    def stop(self, signum: int, grace_seconds: float) -> None:
        """Order every host to end its ranks; from now on they owe us their last word."""
        ending = self.now + grace_seconds + KILL_SECONDS + LAST_WORD_SECONDS
        self.ending = ending if self.ending is None else min(ending, self.ending)
        for link in self.links:
            link.stop(stop_order(signum, grace_seconds))

    @property
    def over(self) -> bool:
        """Whether nothing is left to wait for on any host."""
        return all(
            host.closed is not None or host.swept is not None or self.is_unverifiable(host)
            for host in self.run.hosts
        )

    def is_unverifiable(self, host: HostState) -> bool:
        """Whether a lost host has had its time to answer to a second agent."""
        if host.lost is None:
            return False
        if self.forced_at is not None and self.now - self.forced_at > FORCED_SECONDS:
            return True
        heard_at = self.link(host.plan.node).heard_at
        silent = host.lost_at - heard_at > self.job.limits.lease_seconds or host.opened_at is None
        patience = CONNECT_SECONDS if silent and heard_at < host.lost_at else SWEEP_SECONDS
        return self.now - host.lost_at > patience

    # -- the end

    def result(self) -> Result:
        """What to tell, once every log is complete."""
        cause = self.cause()
        first = self.run.ranks[0].fields
        return Result(
            verdict="interrupted" if self.interrupted else "failed" if cause.exit_code else "done",
            exit_code=cause.exit_code,
            cause=cause.text,
            host=None if cause.node is None else self.run.plan.host(cause.node).name,
            rank=cause.rank,
            log=self.log_of(cause),
            advice=cause.advice,
            traceback=cause.traceback,
            codes={
                rank.rank: rank.ended.exit_code if rank.ended else None for rank in self.run.ranks
            },
            hosts={host.plan.name: host.end_state for host in self.run.hosts},
            seconds=round(self.now - self.run.started_at, 3),
            report={
                name: moved(first[name], Path(self.run.plan.hosts[0].folder), self.job.folder.path)
                for name in REPORTED
                if name in first
            },
            folder=self.job.folder.path,
        )

    def cause(self) -> Cause:
        """Why the run ended."""
        if self.interrupted:
            return interruption(self.interrupted, self.saved)
        if self.troubles:
            return first_cause(self.troubles, self.aftermath, self.journal.tail)
        if self.run.succeeded:
            return Cause("done", 0)
        return Cause("nobody told how the ranks ended", LOST)

    def whereabouts(self, cause: Cause | hangs.Hang) -> str:
        """The rank and host of a cause, as the start of a sentence."""
        if cause.node is None:
            return ""
        host = self.run.plan.host(cause.node).name
        return f"{host}: " if cause.rank is None else f"rank {cause.rank} on {host}: "

    @property
    def saved(self) -> bool:
        """Whether a rank of a task ended in good order when it was asked to."""
        ends = [rank.ended for rank in self.run.ranks if rank.ended and not rank.ended.signal]
        asked = 128 + signal.SIGTERM
        return isinstance(self.job.work, TaskWork) and any(end.code == asked for end in ends)

    def log_of(self, cause: Cause) -> Path | None:
        """The log to look at first: standard error, else output, else the folder of the host."""
        if cause.node is None:
            return None
        logs = [self.journal.log(cause.node, cause.rank, stream) for stream in ("err", "out")]
        for log in logs:
            with suppress(OSError):  # its disk may not answer any more
                if log.exists():
                    return log
        return logs[0].parent

    @contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """Note signals for the next turn; in a thread of somebody's program they are not ours."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.signals.append(number)

        ignored = {number for number in KEPT if signal.getsignal(number) == signal.SIG_IGN}
        heard = [number for number in HEARD if number not in ignored]
        before = {number: signal.signal(number, note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def interruption(number: int, saved: bool) -> Cause:
    """What to tell somebody who stopped the run."""
    what = {signal.SIGINT: "Ctrl-C", signal.SIGPIPE: "its reader, which went away"}
    what |= {STOP_SIGNAL: "./run-ssh stop"}
    name = what.get(signal.Signals(number), signal.Signals(number).name)
    advice = "type it again with --resume latest to go on" if saved else ""
    codes = {signal.SIGUSR1: LOST, STOP_SIGNAL: 128 + signal.SIGINT}
    code = codes.get(signal.Signals(number), 128 + number)  # USR1: a scheduler will run us again
    return Cause(f"stopped by {name}", code, advice=advice)
