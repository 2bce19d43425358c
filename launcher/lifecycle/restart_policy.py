"""After a failure: whether another attempt makes sense, on which hosts, and from where. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from rackrun.errors import UsageError
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.job import TaskWork, Work, without_option
from rackrun.launcher.run.result import Result

HOPELESS = (64, 65, 74, 77, 78)
"""Usage, data, checkpoints, access, preflight: another attempt would end in the same way."""
FAILURES = 2  # after so many, in a row or not, a host is left out


@dataclass(frozen=True)
class RestartState:
    """State of the attempts so far, and the limits for restarts after failures."""

    hosts: tuple[Host, ...]
    """All of them, spares included; those that were lost come last."""
    max_restarts: int = 0
    spares: int = 0
    """This many hosts, at the end of the list, wait until others are lost."""
    min_hosts: int = 0
    """Continue with at least this many hosts; 0: as many as at the start."""
    restarts: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    lost: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    """Those that the list of hosts does not have any more."""

    def __post_init__(self) -> None:
        """Refuse what cannot be kept."""
        least = max(1, self.min_hosts)
        if least > len(self.hosts):
            raise UsageError(f"--min-hosts {least}: there are only {len(self.hosts)} hosts")
        if (most := len(self.hosts) - least) < self.spares:
            given = f"--spares {self.spares} of {len(self.hosts)} hosts"
            raise UsageError(f"{given} leaves fewer than {least} to train; type --spares {most}")

    def active(self) -> tuple[Host, ...]:
        """Return the hosts of the next attempt; none when they are too few."""
        count = len(self.hosts) - self.spares
        fit = self._fit()
        return fit[:count] if len(fit) >= (self.min_hosts or count) else ()

    @property
    def is_short(self) -> bool:
        """Whether fewer hosts are active than at first."""
        return len(self.active()) < len(self.hosts) - self.spares

    @property
    def awaited(self) -> tuple[Host, ...]:
        """The lost hosts that take part again once they are fit."""
        lost = (host for host in self.hosts if host.label in self.lost - self.removed)
        return tuple(host for host in lost if self.failures[host.label] < FAILURES)

    def after(self, result: Result) -> RestartState | None:
        """Return the state after one more failure; None when there is to be no other attempt."""
        if result.verdict != "failed" or result.exit_code in HOPELESS:
            return None
        lost = {name for name, state in result.hosts.items() if state != "clean"}
        # What has failed twice on a host would fail a third time; its link may be well again.
        blamed = {result.host} if result.host else set[str]()
        is_of_rank = result.rank is not None
        following = replace(
            self._with_last(lost if is_of_rank else lost | blamed),
            restarts=self.restarts + 1,
            failures=self.failures + Counter(blamed if is_of_rank else ()),
            lost=self.lost | lost,
        )
        possible = following.restarts <= self.max_restarts and following.active()
        return following if possible else None

    def without(self, hosts: Collection[str]) -> RestartState | None:
        """Return the state without hosts found unfit; None when too few are left."""
        failures = self.failures + Counter(hosts)
        following = replace(self._with_last(hosts), lost=self.lost.union(hosts), failures=failures)
        return following if following.active() else None

    def with_returned(self, hosts: Collection[str]) -> RestartState:
        """Return the state with lost hosts that are fit again."""
        return replace(self, lost=self.lost.difference(hosts))

    def with_listed(self, hosts: Sequence[Host]) -> RestartState:
        """Return the state for a list that was edited: hosts that are new there are spares."""
        known = {host.label for host in self.hosts}
        added = [host for host in hosts if host.label not in known]
        removed = frozenset(known - {host.label for host in hosts})
        everything, spares = (*self.hosts, *added), self.spares + len(added)
        return replace(self, hosts=everything, spares=spares, removed=removed)

    def _with_last(self, labels: Collection[str]) -> RestartState:
        # Others come first: rank 0 stays where its files are, and a spare replaces a lost host.
        return replace(self, hosts=tuple(sorted(self.hosts, key=lambda h: h.label in labels)))

    def _fit(self) -> tuple[Host, ...]:
        return tuple(
            host
            for host in self.hosts
            if host.label not in self.lost | self.removed and self.failures[host.label] < FAILURES
        )


def with_earlier_attempts(work: Work, folder: str) -> Work:
    """Return the task that goes on from the newest checkpoint in its run folder, if there is one.

    Only the hosts know whether it has saved. A command stays as it is.
    """
    if not isinstance(work, TaskWork):
        return work
    return replace(work, options=(*work.options, "--earlier-attempts", folder))


def resumed(work: Work, run: str) -> Work:
    """Return the task with `--resume RUN` in place of any other; a command stays as it is."""
    if not isinstance(work, TaskWork) or not run:
        return work
    return replace(work, options=(*without_option(work.options, "--resume"), "--resume", run))
