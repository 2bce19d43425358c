"""The failures of a run, in order of arrival, and which of them is its root cause."""

from __future__ import annotations

from dataclasses import replace

from launcher.run.events import (
    AskedToStop,
    Closed,
    Event,
    Lost,
    PeerFailed,
    RankEnded,
    Stopping,
    TorchrunEnded,
)
from launcher.run.state import RankState, RunState
from launcher.supervision.hangs import Hang
from launcher.supervision.root_cause import (
    Cause,
    Failure,
    Tail,
    cause_of,
    find_root_failure,
    is_independent,
    is_secondary,
)
from rackrun.contract import phases


def _steps_of(rank: RankState) -> int:
    """Return how many steps a rank was to make; 0 if it has not reported that."""
    steps = rank.fields.get("steps")
    return steps if isinstance(steps, int) else 0


class FailureLog:
    """Collects failures, separately before and after the order to end the run."""

    def __init__(self, run: RunState, tail: Tail) -> None:
        """Store `tail`, which reads the end of a log, where the reason for a failure is."""
        self._run = run
        self._tail = tail
        self._before: list[Failure] = []
        self._after: list[Failure] = []

    def __bool__(self) -> bool:
        """Return whether the run has failed."""
        return bool(self._before)

    def add(self, failure: Failure, after_end: bool) -> None:
        """Add a failure; `after_end`: the ranks had already been ordered to end."""
        (self._after if after_end else self._before).append(failure)

    def take(self, event: Event, after_end: bool) -> None:
        """Add the failure in an event, if there is one; a clean exit is not a failure."""
        match event:
            case RankEnded(exit_code=0):
                pass
            case TorchrunEnded() if all(rank.ended for rank in self._run.ranks_of(event.node)):
                pass  # its exit code only repeats how its ranks have ended
            case Lost() | Stopping() | TorchrunEnded() | AskedToStop() | RankEnded():
                self.add(event, after_end)
            case Closed() if not after_end:
                self._take_early_end(event)

    def _take_early_end(self, event: Closed) -> None:
        """Add the end of an agent if neither an order nor a failure on its host explains it."""
        explained = any(
            not isinstance(failure, PeerFailed) and failure.node == event.node
            for failure in self._before
        )
        if not explained and any(rank.ended is None for rank in self._run.ranks_of(event.node)):
            self._before.append(Lost(event.node, "its agent ended before its ranks did"))

    def root_cause(self) -> Cause:
        """Return the root cause; there must be a failure.

        A rank that waited for another one, or lost it, may have been left by one that had ended
        well and too early: that is added.
        """
        failure = find_root_failure(self._before, self._after, self._tail)
        cause = cause_of(failure, self._tail)
        if not isinstance(failure, Hang) and not is_secondary(failure, self._tail):
            return cause
        return replace(cause, text=f"{cause.text}{self._early_leavers()}")

    def _early_leavers(self) -> str:
        """Return which ranks had ended with 0 before the run was done, as the end of a sentence."""
        furthest = max(max(rank.step, _steps_of(rank)) for rank in self._run.ranks)
        left = [
            rank
            for rank in self._run.ranks
            if rank.ended and not rank.ended.exit_code and rank.phase != phases.DONE
            if rank.step < furthest or not rank.step
        ]
        if not left or len(left) == len(self._run.ranks):
            return ""
        first = left[0]
        host = self._run.plan.host(first.node).name
        more = f", and {len(left) - 1} more ranks with 0" if len(left) > 1 else ""
        at = f" at step {first.step}" if first.phase else ""
        return f"; rank {first.rank} on {host} had ended with 0{at}{more}"

    @property
    def is_secondary(self) -> bool:
        """Return whether all failures here probably follow from one on another node."""
        return all(is_secondary(failure, self._tail) for failure in self._before) and not any(
            is_independent(failure, self._tail) for failure in self._after
        )
