"""Replies of the run manager on a host: shapes that everything is checked against.

A host answers for itself only. It cannot choose which run is meant: other hosts are asked about the
id that was typed, which the first host may only complete.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from rackrun.launcher.detached.entries import Code, Ending, Name, Seconds
from rackrun.launcher.remote.run_manager import MOST_LISTED
from rackrun.launcher.run.events import Count, Node
from rackrun.shapes import AtMost, Between, Matches

RUN = "[0-9a-f]{8}"
Pid = Annotated[int, Between(0, 1 << 31)]


@dataclass(frozen=True)
class RunSummary:
    """Facts about a run that were known when it was started."""

    run: Annotated[str, Matches(RUN)]
    name: str
    hosts: tuple[Name, ...]
    checkpoint_seconds: Seconds
    at: float
    task: str = ""


@dataclass(frozen=True)
class LiveHost:
    """State of a host, as the dashboard has it."""

    name: str = ""
    node: Node = 0
    state: str = ""
    step: Count = 0
    """Of its slowest rank; 0: none yet."""


@dataclass(frozen=True)
class LiveRun:
    """State of a run, from its live.json; empty before its first attempt, and after its end."""

    run_id: Annotated[str, Matches("[0-9a-f]{32}|")] = ""
    seconds: Seconds | None = None
    hosts: tuple[LiveHost, ...] = ()


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run: by its first host, or by its folder on this machine.

    A first host that answers without a summary knows nothing of it.
    """

    summary: RunSummary | None = None
    folder: str = ""
    """The run folder of its newest attempt, where that is."""
    live: LiveRun = LiveRun()
    alive: bool = False
    stopped: Pid = 0
    """The controller, if a signal has suspended it."""
    finish: Ending | None = None
    end: Code | None = None
    error: str = ""
    """Of the run, or why it cannot be said which run is meant."""

    @property
    def step(self) -> int | None:
        """The step of the slowest host; once it has ended, that of the first rank."""
        if self.finish is None:
            return min((host.step for host in self.live.hosts), default=None)
        step = self.finish.report.get("step")
        return step if isinstance(step, int) else None


@dataclass(frozen=True)
class LivingAgent:
    """An agent on a host: of which run, and what its ranks are."""

    run: Annotated[str, Matches("[0-9a-f]{32}")]
    folder: Annotated[str, AtMost(4096)]
    command: tuple[str, ...]
    seconds: Seconds


@dataclass(frozen=True)
class HostRuns:
    """The runs that a host knows of: detached ones that began there, and agents that live there."""

    runs: Annotated[tuple[RunFacts, ...], AtMost(MOST_LISTED)]
    agents: Annotated[tuple[LivingAgent, ...], AtMost(MOST_LISTED)]


@dataclass(frozen=True)
class RunProcess:
    """One process of a run on a host."""

    role: Literal["controller", "agent", "relay", "torchrun", "shim", "rank", "other"]
    pid: Pid
    state: Annotated[str, AtMost(1)]
    seconds: Seconds
    rank: int | None = None
    scratch: Annotated[str, AtMost(4096)] = ""
    """The private folder of its agent, as the host names it; only that host gets it back."""
    heard_seconds_ago: float | None = None
    """Of agents: the age of the last message of the controller; at `lease_seconds` they end."""
    lease_seconds: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Return the known facts, for `--json`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, "")}


@dataclass(frozen=True)
class RunListing:
    """Processes and files of a run on a host, and the interpreter that answers."""

    python: Annotated[str, AtMost(4096)]
    processes: tuple[RunProcess, ...] = ()


@dataclass(frozen=True)
class YesOrNo:
    """Reply to whether a controller lives, was sent a signal, or a path exists."""

    yes: bool


@dataclass(frozen=True)
class EmptyReply:
    """An order was carried out; there is nothing to report."""


@dataclass(frozen=True)
class StartReply:
    """Outcome of a step of the start."""

    port: Annotated[int, Between(0, 65535)] = 0
    ready: bool = False
    begun: bool = False
    error: str = ""
    code: Code = 0
