"""The losses and joins of an elastic run: what `membership` decides is carried out here.

    in the group ──lost, left to others──▶ dropped ──clean, pause over──▶ reserve ◀──added
         ▲                                                                   │
         └──ready── starting ◀──fewer hosts than at the beginning────────────┘

A lost rank starts again on its host. A lost host, once nothing is left running there, goes into the
reserve, from which hosts start as long as the run has fewer than at its beginning. All of these
join as newcomers, after a pause where one was lost again soon (`Retries`). A `--polite` run leaves
hosts that others wait for, and tries now and then to have them again.
"""

from __future__ import annotations

import secrets
import signal
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from launcher.errors import PreflightRefused
from launcher.output.console import ranges
from launcher.output.on_event import EventName
from launcher.run.events import (
    AskedToStop,
    Broken,
    Closed,
    Event,
    Formed,
    Left,
    Lost,
    RankEnded,
    Ready,
    Regrouped,
    Stopping,
    Swept,
    TorchrunEnded,
)
from launcher.run.job import Job
from launcher.run.state import HostState, RunState
from launcher.supervision.agent_protocol import again_order, kill_order, regroup_order, stop_order
from launcher.supervision.agents import AgentGroup
from launcher.supervision.hangs import Hang
from launcher.supervision.membership import Membership, RankGroup, Retries
from launcher.supervision.root_cause import (
    LOST,
    Failure,
    FailureLog,
    Tail,
    as_raised,
    cause_of,
)
from rackrun.run_history import Generation
from rackrun.terminal import one_line
from rackrun.units import age, plural

RESTART_SECONDS = 1.0  # a lost rank may be the first sign of a lost host
SWEEP_SECONDS = 5.0  # between two attempts to reach a lost host
UNEXPLAINED_SECONDS = 2.0  # beyond the time after which a silent host is lost


@dataclass(frozen=True)
class Notice:
    """A line about a loss or a join, for people and for --on-event."""

    text: str
    event: EventName | None = None
    node: int | None = None
    rank: int | None = None


@dataclass
class _HostRecord:
    """What has happened to a host, and when something is due there."""

    is_new: bool = False
    """It was added to the run, and has not started yet."""
    is_dropped: bool = False
    """It was given up: its last events tell nothing new."""
    starting_since: float | None = None
    """When it began to start, while it is on its way into the group."""
    retry_at: float = 0.0
    """When it may start again after a loss."""
    left_until: float | None = None
    """When to try to get it back, where it was left to other launches."""
    sweep_at: float | None = None
    """When to try again to clean up there."""


class Regrouping:
    """Keeps an elastic run going when it loses ranks, and takes in newcomers."""

    def __init__(
        self, job: Job, run: RunState, agents: AgentGroup, failures: FailureLog, tail: Tail
    ) -> None:
        """Expect the ranks of the first hosts; the others are the reserve."""
        self._limits, self._min_hosts = job.template.limits, job.template.min_hosts
        self._run = run
        self._agents = agents
        self._failures = failures
        self._tail = tail
        first = [host.plan.node for host in run.hosts if not host.in_reserve]
        self._membership = Membership(self._ranks_of(*first))
        self._host_count = len(first)
        self._reserve = [host.plan.node for host in run.hosts if host.in_reserve]
        self._hosts: defaultdict[int, _HostRecord] = defaultdict(_HostRecord)
        """By node."""
        self._retries = Retries()
        self._again_at: dict[int, float] = {}
        """When to start lost ranks again, on hosts that have others."""
        self._killed: set[int] = set()
        """Ranks that were stopped by a signal, and killed therefore."""
        self._news: list[Notice | Regrouped] = []
        self._lost: list[str] = []
        """The losses since the newest generation."""
        self._members: tuple[int, ...] = ()
        """Of the newest generation."""

    # -- what happens

    def take(self, event: Event, now: float) -> bool:
        """Take an event; return True when the run goes on, whatever else the event would mean."""
        host = self._hosts[event.node]
        match event:
            case Swept():
                if event.reason:
                    host.sweep_at = now + SWEEP_SECONDS
            case _ if host.is_dropped:
                pass
            case Ready() | Formed() | Broken() | Left():
                self._membership.take(event, now)
            case RankEnded():
                return self._take_end(event, now)
            case Lost() if self.is_still_left(event):
                self._leave(event.node, now)
            case TorchrunEnded() | Closed() if all(
                rank.ended for rank in self._run.ranks_of(event.node)
            ):
                pass  # each of them was lost, or has finished, by itself
            case Closed():
                return self._lose_host(
                    Lost(event.node, "its agent ended before its ranks did"), now
                )
            case Lost() | Stopping() | AskedToStop() | TorchrunEnded():
                return self._lose_host(event, now)
        return True

    def _take_end(self, event: RankEnded, now: float) -> bool:
        """Take the end of a rank: by a signal or with 75 it is lost, with another code it failed.

        A newcomer cannot fail the others: it is lost in any case.
        """
        membership = self._membership
        member = membership.members[event.rank]
        if member.state == "lost":
            return True
        if event.exit_code == 0 or (event.signal and member.state == "left"):
            membership.finish(event.rank)
            return True
        raised = as_raised(event, self._tail(event.node, event.rank, "err"))
        is_failure = not raised.signal and raised.code != LOST
        if is_failure and not membership.is_newcomer(event.rank):
            return False
        if not self._lose([event.rank], event):
            return False
        pause = self._retries.pause_seconds([event.rank])
        if pause and not self._is_in_use(event.node):  # a spare can take its place meanwhile
            return self._lose_host(event, now)
        self._again_at[event.rank] = now + max(pause, RESTART_SECONDS)
        return True

    # -- losses

    def _lose_host(self, failure: Failure, now: float) -> bool:
        """Give up a host; return whether the run goes on without it."""
        node = _node_of(failure)
        ranks = self._ranks_of(node)
        if not self._lose(ranks, failure):
            return False
        self._hosts[node].retry_at = now + self._retries.pause_seconds(ranks)
        self._drop(node)
        if not isinstance(failure, Lost | Stopping):  # its agent lives, and ends what is left there
            self._agents.of(node).stop(stop_order(signal.SIGKILL, 0))
        return True

    def _lose(self, ranks: Iterable[int], failure: Failure) -> bool:
        """Take the loss of ranks of a host; return whether the run goes on without them.

        Before the first generation, and with fewer hosts than it needs, it ends as any other run.
        """
        membership, node = self._membership, _node_of(failure)
        if membership.current is None:
            return False
        cause, lost = cause_of(failure, self._tail), membership.lose(ranks)
        if not lost:
            return True
        self._retries.lose(lost, self._step)
        who = self._run.plan.host(node).name
        who = f"rank {lost[0]} on {who}" if isinstance(failure, RankEnded) else who
        text = f"lost {who} at step {self._step:,}: {one_line(cause.text)}"
        pause = self._retries.pause_seconds(lost)
        again = f"; not started again for {age(pause)}" if pause else ""
        # The supervisor reports a lost agent to --on-event, as in any other run.
        event: EventName | None = None if isinstance(failure, Lost) else "lost"
        self._news.append(Notice(text + again, event, node, cause.rank))
        self._lost.append(text)
        if membership.has_succeeded:
            return True
        return bool(membership.remaining) and len(membership.hosts) >= self._min_hosts

    def _drop(self, node: int) -> None:
        self._hosts[node].is_dropped = True
        self._hosts[node].starting_since = None
        for rank in self._run.ranks_of(node):
            rank.lost = True
            self._again_at.pop(rank.rank, None)

    def add(self, node: int) -> None:
        """Take in a host that the run has got: it joins as soon as it is ready."""
        self._host_count += 1
        self._reserve.insert(0, node)
        self._hosts[node].is_new = True

    # -- hosts that are left to others

    def give_way(self, node: int, user: str, now: float) -> bool:
        """Leave a host to a launch that waits for it; return False where the others are too few.

        One host at a time: who waits for some GPUs asks for all hosts that have them.
        """
        others = self._membership.hosts - {node}
        if self._membership.current is None or len(others) < max(1, self._min_hosts):
            return False
        is_one_asked = any(now < (host.left_until or 0.0) for host in self._hosts.values())
        if node in self._membership.hosts and not is_one_asked:
            name = self._run.plan.host(node).name
            text = f"left {name} at step {self._step:,}: {one_line(user)} waits for it"
            self._news.append(Notice(text, "lost", node))
            self._lost.append(text)
            self._retries.leave(self._ranks_of(node))
            self._leave(node, now)
            self._agents.of(node).stop(stop_order(signal.SIGKILL, 0))
        return True

    def is_still_left(self, event: Event) -> bool:
        """Return whether a host that was left cannot be had again yet: its agent has refused."""
        is_refused = isinstance(event, Lost) and event.exit_code == PreflightRefused.exit_code
        return is_refused and self._hosts[event.node].left_until is not None

    def _leave(self, node: int, now: float) -> None:
        self._membership.lose(self._ranks_of(node))
        self._drop(node)
        self._hosts[node].left_until = now + self._limits.lease_seconds

    # -- what is due

    def advance(self, now: float) -> list[Notice | Regrouped]:
        """Do what is due; return what is to be shown of what has happened."""
        for host in self._run.hosts:
            self._end_stopped(host, now)
            self._recover(host, now)
        if not self._membership.is_finishing:
            self._start_lost_ranks(now)
            self._start_reserve(now)
        limit = self._limits.rendezvous_seconds
        for node, record in self._hosts.items():
            if record.starting_since is not None and now - record.starting_since > limit:
                self._fail_host(Hang(node, None, f"not ready to join after {limit:g} s"), now)
        if (group := self._membership.next_generation(now)) is not None:
            self._announce(group, now)
        self._note_formed(now)
        self._run.has_finished = self._has_finished
        # A broken exchange is often the first sign of a loss, which is known a lease later.
        patience_seconds = self._limits.lease_seconds + UNEXPLAINED_SECONDS
        if broken := self._membership.problem(now, patience_seconds):
            self._failures.add(broken, after_end=False)
        news, self._news = self._news, []
        return news

    def _end_stopped(self, host: HostState, now: float) -> None:
        """End what has been stopped by a signal for as long as a host may be silent."""
        is_late = now - host.frozen_since > self._limits.lease_seconds
        if host.over or not host.frozen or not is_late:
            return
        ranks = {f"rank {rank.rank}": rank.rank for rank in self._run.ranks_of(host.plan.node)}
        if not all(name in ranks for name in host.frozen):  # torchrun, or a shim
            names = " and ".join(host.frozen)
            self._fail_host(Hang(host.plan.node, None, f"{names} stopped by a signal"), now)
            return
        for number in {ranks[name] for name in host.frozen} - self._killed:
            self._killed.add(number)
            self._agents.of(host.plan.node).send(kill_order(number - host.plan.first_rank))

    def _recover(self, host: HostState, now: float) -> None:
        """Put a lost host into the reserve, once nothing is left there and it may start again."""
        node, record = host.plan.node, self._hosts[host.plan.node]
        if not record.is_dropped:
            return
        if record.sweep_at is not None and now > record.sweep_at:
            record.sweep_at = None
            if swept := self._agents.clean_up(node):
                self._run.take(swept, now)
                self.take(swept, now)
        has_ended = (host.closed or host.swept) and self._agents.has_ended(node)
        may_start = now >= max(record.retry_at, record.left_until or 0.0)
        if has_ended and host.end_state == "clean" and may_start:
            record.is_dropped = False
            self._reserve.append(node)

    def _start_lost_ranks(self, now: float) -> None:
        for number in [number for number, at in self._again_at.items() if now > at]:
            if not self._membership.is_newcomer(number):  # the group without it is not announced
                continue
            del self._again_at[number]
            self._killed.discard(number)
            node = self._run.rank(number).node
            self._run.renew_rank(number)
            self._membership.expect({number: node})
            record = self._hosts[node]
            record.starting_since = now if record.starting_since is None else record.starting_since
            first = self._run.plan.host(node).first_rank
            self._agents.of(node).send(again_order(number - first))

    def _start_reserve(self, now: float) -> None:
        """Start hosts of the reserve in place of those that are missing."""

        def lives(node: int) -> bool:
            waits = any(number in self._again_at for number in self._ranks_of(node))
            return waits or self._is_in_use(node)

        nodes = [host.plan.node for host in self._run.hosts]
        while self._reserve and sum(map(lives, nodes)) < self._host_count:
            node = self._reserve.pop(0)
            ranks, record = self._ranks_of(node), self._hosts[node]
            self._run.renew(node, now)
            self._killed -= ranks.keys()
            self._membership.expect(ranks)
            record.starting_since = now
            self._agents.start_again(node)
            if record.left_until is None:  # else each attempt to get it back would be reported
                new = ", new in the host file," if record.is_new else ""
                name = self._run.plan.host(node).name
                self._news.append(Notice(f"{name}{new} starts, and will join"))
                record.is_new = False

    def _fail_host(self, failure: Hang, now: float) -> None:
        """Give up a host, and end the run if it cannot go on without it."""
        if not self._lose_host(failure, now):
            self._failures.add(failure, after_end=False)

    # -- groups

    def _announce(self, group: RankGroup, now: float) -> None:
        run = self._run
        nodes = list(dict.fromkeys(run.rank(number).node for number in group.members))
        order = regroup_order(
            {
                "generation": group.generation,
                "members": group.members,
                "master": (run.plan.host(nodes[0]).address, group.port),
                "token": secrets.token_hex(16),
                "reason": group.reason,
                "abort": group.abort,
            }
        )
        for node in nodes:
            self._agents.of(node).send(order)
        self._retries.join(group.members, self._step)
        joined = [number for number in group.members if number not in self._members]
        for number in joined:
            record = self._hosts[run.rank(number).node]
            record.starting_since = record.left_until = None
        self._members = group.members
        generation = Generation(
            group.generation,
            len(group.members),
            len(nodes),
            seconds=round(now - run.started_at, 3),
            lost=tuple(self._lost),
            joined=tuple(self._named(joined) if run.generations else ()),
        )
        self._regrouped(generation, now)
        self._lost = []

    def _regrouped(self, generation: Generation, now: float) -> None:
        leader = self._members[0]
        event = Regrouped(self._run.rank(leader).node, leader, generation)
        self._run.take(event, now)
        self._news.append(event)

    def _note_formed(self, now: float) -> None:
        """Write down, once, that the newest group is whole, and from which step it goes on."""
        newest = self._run.generations[-1] if self._run.generations else None
        step = self._membership.formed_step
        if newest is None or newest.step is not None or step is None:
            return
        seconds = max(0.0, round(now - self._run.started_at - newest.seconds, 3))
        self._regrouped(replace(newest, step=step, regroup_seconds=seconds), now)
        who = f"{plural(newest.ranks, 'rank')} on {plural(newest.hosts, 'host')}"
        if newest.number > 1:
            joined = f"{', '.join(newest.joined)} joined; " if newest.joined else ""
            go = "goes" if newest.ranks == 1 else "go"
            text = f"{joined}{who} {go} on from step {step:,} (generation {newest.number})"
            self._news.append(Notice(text, "joined" if newest.joined else None))

    # -- what is known

    @property
    def _has_finished(self) -> bool:
        """Return whether the training is done, and the ranks that did it have ended."""
        members = self._membership.members.items()
        finished = [self._run.rank(number) for number, member in members if member.state == "left"]
        has_ended = all(rank.lost or rank.ended is not None for rank in finished)
        return self._membership.has_succeeded and has_ended

    @property
    def _step(self) -> int:
        return max(rank.step for rank in self._run.ranks)  # most report only every few steps

    def _is_in_use(self, node: int) -> bool:
        """Return whether a rank of a host trains, or is about to."""
        members = self._membership.members
        ranks = self._ranks_of(node)
        return any(number in members and members[number].state != "lost" for number in ranks)

    def _named(self, ranks: Iterable[int]) -> list[str]:
        by_node: dict[int, list[int]] = {}
        for number in ranks:
            by_node.setdefault(self._run.rank(number).node, []).append(number)
        return [
            f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)} on {plan.name}"
            for node, numbers in by_node.items()
            for plan in [self._run.plan.host(node)]
        ]

    def _ranks_of(self, *nodes: int) -> dict[int, int]:
        """Return the ranks of hosts, by number, with their nodes."""
        return {rank.rank: node for node in nodes for rank in self._run.ranks_of(node)}


def _node_of(failure: Failure) -> int:
    assert failure.node is not None
    return failure.node
