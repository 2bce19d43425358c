"""Updates between the launchers of a run's nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.run.events import PeerHangLimit
from launcher.run.job import Limits
from launcher.run.state import RunState
from launcher.supervision.agent_client import EventQueue
from launcher.supervision.failures import FailureLog
from launcher.supervision.hangs import longest_hang_limit
from rackrun.terminal import one_line

if TYPE_CHECKING:
    from launcher.supervision.peers import Peers

_EXPLANATION_SECONDS = 5.0  # for another node to report the failure that ours followed from


class PeerUpdates:
    """Keeps the other nodes up to date; does nothing if there are none."""

    def __init__(self, peers: Peers | None, run: RunState, failures: FailureLog) -> None:
        """Take the peers; None for a launcher that supervises the whole run."""
        self._peers = peers
        self._run = run
        self._failures = failures
        self._hang_limits: dict[int, float] = {}
        """How long the ranks of other nodes may go without progress, by node."""
        self._failed_at = 0.0

    def listen(self, events: EventQueue) -> None:
        """Start to put reports of other nodes on the queue."""
        if self._peers:
            self._peers.listen(events)

    def take(self, event: PeerHangLimit) -> None:
        """Record how long the ranks of another node may make no progress."""
        self._hang_limits[event.node] = event.seconds

    def exchange_hang_limit(self, limits: Limits, now: float) -> float:
        """Send how long our ranks may make no progress; return the same for other nodes."""
        if self._peers:
            self._peers.send_hang_limit(longest_hang_limit(self._run, limits, now))
        return max(self._hang_limits.values(), default=0.0)

    def send_stop(self, signum: int) -> None:
        """Ask the other nodes to save and to end."""
        if self._peers:
            self._peers.send_stop(signum)

    def send_failure(self, now: float) -> None:
        """Send the root cause, so that the other nodes end too; again only when it has changed."""
        self._failed_at = self._failed_at or now
        if not self._peers:
            return
        cause = self._failures.root_cause()
        if cause.node is None:  # another node has reported it
            return
        who = "" if cause.rank is None else f"rank {cause.rank}: "
        self._peers.send_failure(
            who + one_line(cause.text), cause.exit_code, self._failures.is_secondary
        )

    def may_explain(self, now: float) -> bool:
        """Return whether another node may soon report the failure that caused ours."""
        if not self._peers or not self._failures or now - self._failed_at > _EXPLANATION_SECONDS:
            return False
        return self._failures.is_secondary
