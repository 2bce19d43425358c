"""What a run's folder and its hosts say about it: shapes that everything is checked against."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from rackrun.launcher.remote.run_processes import MOST_LISTED
from rackrun.launcher.run.events import Count, Node
from rackrun.launcher.viewer.entries import Code, Ending, Seconds
from rackrun.shapes import AtMost, Between, Matches

Pid = Annotated[int, Between(0, 1 << 31)]


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
    """What the folder of a run says about it."""

    folder: str = ""
    live: LiveRun = LiveRun()
    alive: bool = False
    finish: Ending | None = None
    end: Code | None = None


@dataclass(frozen=True)
class LivingAgent:
    """An agent on a host: of which run, and what its ranks are."""

    run: Annotated[str, Matches("[0-9a-f]{32}")]
    folder: Annotated[str, AtMost(4096)]
    command: tuple[str, ...]
    seconds: Seconds


@dataclass(frozen=True)
class HostRuns:
    """The agents that live on a host."""

    agents: Annotated[tuple[LivingAgent, ...], AtMost(MOST_LISTED)]


@dataclass(frozen=True)
class RunProcess:
    """One process of a run on a host."""

    role: Literal["agent", "torchrun", "shim", "rank", "other"]
    pid: Pid
    state: Annotated[str, AtMost(1)]
    seconds: Seconds
    rank: int | None = None
    scratch: Annotated[str, AtMost(4096)] = ""
    """The private folder of its agent, as the host names it; only that host gets it back."""
    heard_seconds_ago: float | None = None
    """Of agents: the age of the last message of the launcher; at `lease_seconds` they end."""
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
