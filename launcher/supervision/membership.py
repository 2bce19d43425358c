"""Which ranks of an elastic run train together, and when lost ones start again. Pure.

What happens to ranks goes in, generations come out.

A member is a rank of the plan, by its number. A generation is a group of members in the order of
their ranks in it; its first member's port is where the others meet. A rank obeys the newest
generation that it has seen, so a rank that is not in there cannot speak for the group any more.

    not ready ──ready──▶ waiting ──in a generation──▶ member ──left──▶ finished
        ▲                                               │
        └──expect (its process starts anew)── lost ◀────┘

Losses interrupt the group at once, and joins wait until it is whole: then a newcomer costs the
others no step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from launcher.run.events import Broken, Formed, GroupEvent, Left, Ready

RETRY_SECONDS = 2.0  # after a broken exchange without a loss: the link may be there again
RETRY_EVERY_SECONDS = 60.0  # an error that comes again sooner stands


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a generation, as it is announced to them."""

    generation: int
    members: tuple[int, ...]
    """Member numbers, in the order of ranks."""
    port: int
    """Where the first member listens for the others."""
    abort: bool
    """A member was lost: ranks stop what they do now, not at the end of a step."""
    reason: str


@dataclass
class GroupMember:
    """A rank, as far as groups are concerned."""

    node: int
    port: int = 0
    """Where it listens, for any group; 0: it is not ready."""
    formed: Formed | None = None
    """The newest generation that it is in."""
    state: str = "starting"
    """starting, ready, lost, left; a member of the current generation is ready."""


class Membership:
    """The members of a run, and the newest generation of them."""

    def __init__(self, members: Mapping[int, int]) -> None:
        """Expect the first members, by the nodes that they run on."""
        self.members = {number: GroupMember(node) for number, node in members.items()}
        self.current: RankGroup | None = None
        self._broken: Broken | None = None
        """The first failed exchange of the current generation."""
        self._broken_at = 0.0
        self._retried_at = -RETRY_EVERY_SECONDS

    def take(self, event: GroupEvent, now: float) -> None:
        """Take a message of a rank that lives; those about an older generation count no more."""
        member = self.members[event.rank]
        if member.state in ("lost", "left"):
            return
        match event:
            case Ready():
                member.port, member.state = event.port, "ready"
            case Formed() if self._is_current(event):
                member.formed = event
            case Broken() if self._is_current(event):
                if self._broken is None:
                    self._broken, self._broken_at = event, now
            case Left():
                member.state = "left"

    def expect(self, members: Mapping[int, int]) -> None:
        """Expect newcomers, by node: their processes are about to start."""
        self.members |= {number: GroupMember(node) for number, node in members.items()}

    def finish(self, number: int) -> None:
        """Take the end of a rank with exit code 0."""
        if self.members[number].state != "lost":
            self.members[number].state = "left"

    def lose(self, members: Iterable[int]) -> list[int]:
        """Take the loss of members; return those that were not lost, and had not left, before."""
        lost = [number for number in members if self.members[number].state not in ("lost", "left")]
        for number in lost:
            self.members[number].state = "lost"
        return lost

    def next_generation(self, now: float) -> RankGroup | None:
        """Return the next generation, if there is to be one; its first member has the results."""
        members, abort, reason = self._next_members(now)
        if not members:
            return None
        before = self.current.generation if self.current else 0
        port = self.members[members[0]].port
        self.current = RankGroup(before + 1, tuple(members), port, abort, reason)
        self._broken = None
        return self.current

    def _next_members(self, now: float) -> tuple[list[int], bool, str]:
        """Return the members of the next generation, none for no other; whether to abort; why."""
        if self.current is None:
            first = self._with("starting", "ready")
            return (first if first == self._with("ready") else []), False, "start"
        left = self.remaining
        if lost := [n for n in self.current.members if self.members[n].state == "lost"]:
            return left, True, f"lost: {', '.join(map(str, lost))}"
        is_working = self.is_whole and self._broken is None
        if is_working and not self.is_finishing and (newcomers := self._newcomers()):
            return [*left, *newcomers], False, f"joined: {', '.join(map(str, newcomers))}"
        is_broken = self._broken is not None and now - self._broken_at > RETRY_SECONDS
        if left and is_broken and now - self._retried_at > RETRY_EVERY_SECONDS:
            self._retried_at = now
            return left, True, "an exchange failed, and no rank is lost"
        return [], False, ""

    @property
    def remaining(self) -> list[int]:
        """Return the members of the current generation that are neither lost nor done.

        Where some are done, newcomers that have not been in a group are left out: they have no
        part of the results, and would begin from the start.
        """
        numbers = self.current.members if self.current else ()
        members = {number: self.members[number] for number in numbers}
        return [
            number
            for number, member in members.items()
            if member.state == "ready" and (member.formed or not self.is_finishing)
        ]

    @property
    def is_whole(self) -> bool:
        """Return whether all that remain of the current generation have formed its group."""
        formed = (self.members[number].formed for number in self.remaining)
        return all(event is not None and self._is_current(event) for event in formed)

    @property
    def hosts(self) -> set[int]:
        """Return the nodes with members that train, or are to; done ones count."""
        members = self.current.members if self.current else self.members
        return {
            self.members[number].node for number in members if self.members[number].state != "lost"
        }

    @property
    def has_succeeded(self) -> bool:
        """Return whether the training is done: its first rank has finished, and none trains on.

        A rank that is lost after the others have finished leaves nothing undone.
        """
        current = self.current
        return (
            current is not None
            and not self.remaining
            and self.members[current.members[0]].state == "left"
        )

    @property
    def is_finishing(self) -> bool:
        """Return whether there is no group yet, or a member of it has finished its training."""
        members = self.current.members if self.current else ()
        return not members or any(self.members[number].state == "left" for number in members)

    def is_newcomer(self, number: int) -> bool:
        """Return whether a rank has yet to join the others."""
        return self.current is not None and number not in self.current.members

    @property
    def formed_step(self) -> int | None:
        """Return the step from which the current group goes on; None while it is not whole."""
        formed = [self.members[number].formed for number in self.remaining if self.is_whole]
        return next((event.step for event in formed if event), None)

    def problem(self, now: float, seconds: float) -> Broken | None:
        """Return why the current group cannot train: it differs, or has failed without a loss.

        A loss may explain a failed exchange only `seconds` later.
        """
        if differing := self._differing():
            return differing
        is_early = self._broken is not None and now - self._broken_at <= seconds
        return None if is_early else self._broken

    def _differing(self) -> Broken | None:
        """Return a member whose state is not that of the others."""
        events = [self.members[number].formed for number in self.remaining]
        formed = [event for event in events if event and self._is_current(event)]
        for event in formed:
            if (event.step, event.digest) != (formed[0].step, formed[0].digest):
                text = f"its state of step {event.step} is not that of rank {formed[0].rank}"
                return Broken(event.node, event.rank, event.generation, text)
        return None

    def _newcomers(self) -> list[int]:
        """Return the ranks that are ready to join, of hosts of which none is still starting."""
        starting = {self.members[number].node for number in self._with("starting")}
        return [
            number
            for number in self._with("ready")
            if self.is_newcomer(number) and self.members[number].node not in starting
        ]

    def _with(self, *states: str) -> list[int]:
        return [number for number in sorted(self.members) if self.members[number].state in states]

    def _is_current(self, event: Formed | Broken) -> bool:
        return self.current is not None and event.generation == self.current.generation


LASTING_STEPS = 20
"""After this many steps with the others, a loss is a first one again."""
PAUSE_SECONDS = 30.0
"""After the second loss in a row; twice as long after each further one."""


class Retries:
    """The losses of each rank in a row, and for how long it is not to start again after them.

    A first loss says little: the rank starts again at once. One that is lost again before it has
    trained for a while may never train: the more often in a row, the longer it waits. So a host
    that fails at each start is tried a dozen times a day, and one that was only unlucky (a switch
    that restarts, a disk that hangs for a minute) returns.
    """

    def __init__(self) -> None:
        self._joined_at: dict[int, int] = {}
        """The step at which a rank of the group has joined it."""
        self._losses: Counter[int] = Counter()

    def join(self, ranks: Iterable[int], step: int) -> None:
        """Take note of the ranks that are in the group now; some may have been there before."""
        for rank in ranks:
            self._joined_at.setdefault(rank, step)

    def leave(self, ranks: Iterable[int]) -> None:
        """Take note of ranks that have been sent away, which is no loss."""
        for rank in ranks:
            self._joined_at.pop(rank, None)

    def lose(self, ranks: Iterable[int], step: int) -> None:
        """Count the loss of ranks, of the group or on their way there."""
        for rank in ranks:
            joined_at = self._joined_at.pop(rank, step)
            has_lasted = step - joined_at >= LASTING_STEPS
            self._losses[rank] = 1 if has_lasted else self._losses[rank] + 1

    def pause_seconds(self, ranks: Iterable[int]) -> float:
        """Return for how long these ranks, of one host, are not to start again."""
        in_a_row = max((self._losses[rank] for rank in ranks), default=0)
        return PAUSE_SECONDS * 2 ** (in_a_row - 2) if in_a_row > 1 else 0.0
