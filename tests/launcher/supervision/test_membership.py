"""Which ranks of an elastic run train together, and when lost ones start again."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from launcher.run.events import Broken, Formed, Left, Ready
from launcher.supervision.membership import (
    LASTING_STEPS,
    PAUSE_SECONDS,
    RETRY_EVERY_SECONDS,
    RETRY_SECONDS,
    Membership,
    RankGroup,
    Retries,
)

HOUR = 3600.0
NODES = {0: 0, 1: 1, 2: 1, 3: 2}
"""Member -> node."""


def begun(nodes: dict[int, int] = NODES) -> Membership:
    """Return the membership of a run whose first group has formed."""
    membership = Membership(nodes)
    for number, node in nodes.items():
        membership.take(Ready(node, number, 1000 + number), 0.0)
    form(membership, membership.next_generation(0.0), ports=2000)
    return membership


def form(membership: Membership, group: RankGroup | None, ports: int, digest: str = "d") -> None:
    assert group is not None
    for number in group.members:
        node = membership.members[number].node
        membership.take(Formed(node, number, group.generation, 7, digest), 0.0)
        membership.take(Ready(node, number, ports + number), 0.0)


def test_the_first_group_waits_for_all() -> None:
    """No group forms before every first rank is ready; rank 0 leads it on its own port."""
    membership = Membership(NODES)
    for number in (3, 1, 0):
        membership.take(Ready(NODES[number], number, 1000 + number), 0.0)
    assert membership.next_generation(0.0) is None
    membership.take(Ready(1, 2, 1002), 0.0)
    group = membership.next_generation(0.0)
    assert group == RankGroup(1, (0, 1, 2, 3), 1000, abort=False, reason="start")
    assert membership.next_generation(0.0) is None


def test_a_loss_interrupts_and_two_are_one() -> None:
    """Two members lost at once leave one smaller group, at once; the next in order leads it."""
    membership = begun()
    assert membership.lose([0]) == [0]
    assert membership.lose([0, 3]) == [3]
    group = membership.next_generation(0.0)
    assert group is not None and group.members == (1, 2) and group.abort and group.port == 2001


def test_a_loss_while_a_group_forms() -> None:
    """A member lost before its group is whole is left out by another generation."""
    membership = begun()
    membership.lose([3])
    assert membership.next_generation(0.0) is not None
    membership.take(Ready(0, 0, 3000), 0.0)
    membership.lose([1])
    group = membership.next_generation(0.0)
    assert group is not None and group.generation == 3 and group.members == (0, 2)
    membership.take(Formed(0, 0, 2, 7, "d"), 0.0)  # of the generation before
    assert not membership.is_whole


def test_the_first_member_leads_one_group_after_another() -> None:
    """Losses one after the other do not wait for ranks to say anything: it is met on its port."""
    membership = begun()
    membership.lose([3])
    assert membership.next_generation(0.0) is not None
    membership.lose([2])
    group = membership.next_generation(0.0)
    assert group is not None and group.members == (0, 1) and group.port == 2000


def test_a_newcomer_waits_for_the_others_and_for_its_host() -> None:
    """The ranks of a host that returns join together, at a step's end, once the group is whole."""
    membership = begun()
    membership.lose([1, 2])
    membership.expect({})
    group = membership.next_generation(0.0)
    membership.expect({1: 1, 2: 1})
    membership.take(Ready(1, 2, 4002), 0.0)
    membership.take(Ready(1, 1, 4001), 0.0)
    assert membership.next_generation(0.0) is None, "the others have not formed theirs"
    form(membership, group, 5000)
    joined = membership.next_generation(0.0)
    assert joined is not None and joined.members == (0, 3, 1, 2) and not joined.abort
    other = begun()
    other.lose([1, 2])
    form(other, other.next_generation(0.0), 5000)
    other.expect({1: 1, 2: 1})
    other.take(Ready(1, 1, 4001), 0.0)
    assert other.next_generation(0.0) is None, "a rank of that host still starts"


def test_nobody_joins_a_run_that_finishes() -> None:
    """Once a member has finished its training, newcomers are not taken any more."""
    membership = begun()
    membership.lose([3])
    form(membership, membership.next_generation(0.0), 5000)
    membership.expect({3: 2})
    membership.take(Ready(2, 3, 4003), 0.0)
    membership.take(Left(0, 0, 2), 0.0)
    assert membership.next_generation(0.0) is None


def test_a_newcomer_does_not_begin_anew_where_the_others_have_finished() -> None:
    """One that was to join when the others ended is not needed: it would train from the start."""
    membership = begun()
    membership.lose([3])
    form(membership, membership.next_generation(0.0), 5000)
    membership.expect({3: 2})
    membership.take(Ready(2, 3, 4003), 0.0)
    joined = membership.next_generation(0.0)
    assert joined is not None and joined.members == (0, 1, 2, 3)
    for number in (0, 1):
        membership.take(Left(NODES[number], number, 2), 0.0)
    assert membership.remaining == [2] and not membership.has_succeeded
    membership.take(Broken(2, 3, joined.generation, "not formed"), 0.0)
    membership.take(Left(NODES[2], 2, 2), 0.0)
    assert membership.next_generation(1000.0) is None and membership.has_succeeded


def test_success_is_that_of_the_last_group() -> None:
    """The training is done when the first rank has finished, and nobody of its group trains on."""
    membership = begun()
    for number in (0, 1, 3):
        membership.take(Left(NODES[number], number, 1), 0.0)
    assert not membership.has_succeeded
    membership.lose([2])
    assert membership.next_generation(0.0) is None
    assert membership.has_succeeded
    without_first = begun()
    for number in (1, 2, 3):
        without_first.take(Left(NODES[number], number, 1), 0.0)
    without_first.lose([0])
    assert not without_first.has_succeeded


def test_a_broken_exchange_is_tried_again_once() -> None:
    """A failed exchange without a loss regroups the same members, once; then its error stands."""
    membership = begun()
    broken = Broken(1, 1, 1, "Connection reset")
    membership.take(broken, 10.0)
    assert membership.next_generation(10.0 + RETRY_SECONDS / 2) is None
    again = membership.next_generation(10.1 + RETRY_SECONDS)
    assert again is not None and again.members == (0, 1, 2, 3) and again.abort
    form(membership, again, 5000)
    later = Broken(1, 1, again.generation, "Connection reset")
    membership.take(later, 20.0)
    assert membership.next_generation(30.0) is None
    assert membership.problem(30.0, 15.0) is None
    assert membership.problem(36.0, 15.0) == later
    assert membership.next_generation(20.0 + RETRY_EVERY_SECONDS) is not None


def test_states_that_differ_are_a_failure() -> None:
    """Members that report different states of one generation are not believed to train together."""
    membership = begun()
    membership.lose([3])
    group = membership.next_generation(0.0)
    form(membership, group, 5000)
    assert membership.problem(0.0, 15.0) is None
    membership.take(Formed(1, 2, 2, 7, "another"), 0.0)
    problem = membership.problem(0.0, 15.0)
    assert problem is not None and problem.rank == 2
    assert problem.error == "its state of step 7 is not that of rank 0"


@dataclass
class Rank:
    """A rank that obeys: its port, the newest generation it has seen, and what it has sent."""

    node: int
    alive: bool = False
    port: int = 0
    group: RankGroup | None = None
    formed: int = 0
    sent: deque[object] = field(default_factory=deque)
    inbox: deque[RankGroup] = field(default_factory=deque)


class World:
    """Ranks and messages that take any time, in order for each rank."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.nodes = {number: number // 2 for number in range(6)}
        self.membership = Membership(self.nodes)
        self.ranks = {number: Rank(node) for number, node in self.nodes.items()}
        self.ports = iter(range(1, 60000))
        self.newest = 0
        self.now = 0.0
        self.lost: set[int] = set()
        for number in self.ranks:
            self.start(number)

    def start(self, number: int) -> None:
        rank = self.ranks[number]
        rank = self.ranks[number] = Rank(rank.node, alive=True, port=next(self.ports))
        rank.sent.append(Ready(rank.node, number, rank.port))

    def act(self) -> None:
        """Let one thing happen."""
        self.now += 0.01
        number = self.dice.choice([*self.ranks])
        rank = self.ranks[number]
        what = self.dice.random()
        if what < 0.4 and rank.sent:
            message = rank.sent.popleft()
            self.membership.take(message, self.now)  # type: ignore[arg-type]
        elif what < 0.7 and rank.inbox and rank.alive:
            self.obey(number, rank.inbox.popleft())
        elif what < 0.9:
            self.meet(number)
        self.announce()

    def obey(self, number: int, group: RankGroup) -> None:
        rank = self.ranks[number]
        if rank.group and group.generation <= rank.group.generation:
            return
        rank.group = group
        if group.members[0] == number:
            assert rank.port == group.port, "a port that it does not have any more"

    def meet(self, number: int) -> None:
        """Form the group of a rank if all its members are there."""
        group = self.ranks[number].group
        if group is None or not self.ranks[number].alive:
            return
        members = [self.ranks[one] for one in group.members]
        if all(rank.alive and rank.group == group for rank in members):
            for one in group.members:
                rank = self.ranks[one]
                if rank.formed < group.generation:
                    rank.formed = group.generation
                    rank.sent.append(Formed(rank.node, one, group.generation, 1, "d"))

    def announce(self) -> None:
        before = self.membership.current
        was_whole = before is None or self.membership.is_whole
        group = self.membership.next_generation(self.now)
        if group is None:
            return
        assert group.generation > self.newest
        self.newest = group.generation
        assert not self.lost & set(group.members), "a lost rank is a member"
        assert len(set(group.members)) == len(group.members)
        if before is not None and not group.abort:
            assert was_whole and set(before.members) < set(group.members)
        for number in group.members:
            self.ranks[number].inbox.append(group)

    def kill(self, number: int) -> None:
        rank = self.ranks[number]
        rank.alive = False
        while rank.sent and self.dice.random() < 0.5:  # the agent passes on what it has read
            self.membership.take(rank.sent.popleft(), self.now)  # type: ignore[arg-type]
        rank.sent.clear()
        rank.inbox.clear()
        self.membership.lose([number])
        self.lost.add(number)

    def revive(self) -> None:
        for number in [n for n in self.lost if self.membership.is_newcomer(n)]:
            self.lost.discard(number)
            self.membership.expect({number: self.nodes[number]})
            self.start(number)

    @property
    def is_quiet(self) -> bool:
        group = self.membership.current
        alive = {number for number, rank in self.ranks.items() if rank.alive}
        return (
            group is not None
            and set(group.members) == alive
            and all(self.ranks[number].formed == group.generation for number in alive)
            and self.membership.is_whole
        )


@pytest.mark.parametrize("seeds", [12, pytest.param(1000, marks=pytest.mark.long)])
def test_random_losses_and_returns(seeds: int) -> None:
    """Whatever is lost when, generations grow, name living ranks and their ports, and settle."""
    for seed in range(seeds):
        world = World(seed)
        for _ in range(world.dice.randrange(2, 8)):
            for _ in range(world.dice.randrange(0, 300)):
                world.act()
            living = [number for number, rank in world.ranks.items() if rank.alive]
            if world.membership.current is not None:
                if len(living) > 2:
                    world.kill(world.dice.choice(living))
                if world.dice.random() < 0.5:
                    world.revive()
        for _ in range(20000):
            world.act()
            world.revive()
            if world.is_quiet and not world.lost:
                break
        assert world.is_quiet, f"seed {seed} does not settle"


def test_a_host_that_is_lost_once_an_hour_always_returns_at_once() -> None:
    """Thirty losses of ranks that train in between are thirty first ones."""
    retries = Retries()
    for hour in range(30):
        retries.join([4, 5], hour * LASTING_STEPS)
        retries.lose([4, 5], (hour + 1) * LASTING_STEPS)
        assert retries.pause_seconds([4, 5]) == 0


def test_a_host_that_fails_at_each_start_is_tried_ever_less_often() -> None:
    """A day has thirteen starts that fail after a minute; steps of the others do not count."""
    retries, now, starts = Retries(), 0.0, 0
    while now < 24 * HOUR:
        starts += 1
        retries.lose([0], step=round(now))  # the others go on, a step a second
        now += 60 + retries.pause_seconds([0])
    assert starts == 13


def test_a_rank_that_dies_at_its_first_steps_counts_as_one_that_never_joined() -> None:
    """What counts are steps with the others, not those that have been made at its loss."""
    retries = Retries()
    retries.join([0, 1], 0)
    for step in (5000, 5010, 5010 + 2 * LASTING_STEPS - 1):
        retries.lose([1], step)
        retries.join([0, 1], step + LASTING_STEPS)
    assert retries.pause_seconds([1]) == 2 * PAUSE_SECONDS
    assert retries.pause_seconds([0]) == 0, "the other rank of the host has trained on"
    retries.lose([0, 1], 5010 + 5 * LASTING_STEPS)
    assert retries.pause_seconds([0, 1]) == 0, "both have trained for a while"


def test_what_was_sent_away_is_not_lost() -> None:
    """A rank whose host was left to another launch begins again without a loss."""
    retries = Retries()
    retries.join([0], 100)
    retries.leave([0])
    retries.join([0], 200)
    retries.lose([0], 200 + LASTING_STEPS)
    assert retries.pause_seconds([0]) == 0
