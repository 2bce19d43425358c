"""The failures of a run, in order of arrival, and which of them is its root cause."""

from __future__ import annotations

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
from launcher.run.state import RunState
from launcher.supervision.root_cause import (
    Cause,
    Failure,
    Tail,
    find_root_cause,
    is_independent,
    is_secondary,
)


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
        """Return the root cause; there must be a failure."""
        return find_root_cause(self._before, self._after, self._tail)

    @property
    def is_secondary(self) -> bool:
        """Return whether all failures here probably follow from one on another node."""
        return all(is_secondary(failure, self._tail) for failure in self._before) and not any(
            is_independent(failure, self._tail) for failure in self._after
        )
