"""What a run's folder and its hosts say about it: shapes that everything is checked against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import structs

from rackrun.launcher.remote.run_processes import MOST_LISTED
from rackrun.launcher.run.events import Count, Node
from rackrun.launcher.viewer.entries import Code, Ending, Seconds
from rackrun.shapes import Excerpt, Real, Shape, Whole, at_most, between, matches

Pid = Annotated[int, between(0, 1 << 31)]


class LiveHost(Excerpt, frozen=True):
    """State of a host, as the dashboard has it."""

    name: str = ""
    node: Node = 0
    state: str = ""
    step: Count = 0
    """Of its slowest rank; 0: none yet."""


class LiveRun(Excerpt, frozen=True):
    """State of a run, from its live.json; empty before its first attempt, and after its end."""

    run_id: Annotated[str, matches("[0-9a-f]{32}|")] = ""
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


class LivingAgent(Shape, frozen=True):
    """An agent on a host: of which run, and what its ranks are."""

    run: Annotated[str, matches("[0-9a-f]{32}")]
    folder: Annotated[str, at_most(4096)]
    command: tuple[str, ...]
    seconds: Seconds


class HostRuns(Shape, frozen=True):
    """The agents that live on a host."""

    agents: Annotated[tuple[LivingAgent, ...], at_most(MOST_LISTED)]


class RunProcess(Shape, frozen=True):
    """One process of a run on a host."""

    role: Literal["agent", "torchrun", "shim", "rank", "other"]
    pid: Pid
    state: Annotated[str, at_most(1)]
    seconds: Seconds
    rank: Whole | None = None
    scratch: Annotated[str, at_most(4096)] = ""
    """The private folder of its agent, as the host names it; only that host gets it back."""
    heard_seconds_ago: Real | None = None
    """Of agents: the age of the last message of the launcher; at `lease_seconds` they end."""
    lease_seconds: Real | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Return the known facts, for `--json`."""
        values = structs.asdict(self)
        return {name: value for name, value in values.items() if value not in (None, "")}


class RunListing(Shape, frozen=True):
    """Processes and files of a run on a host, and the interpreter that answers."""

    python: Annotated[str, at_most(4096)]
    processes: tuple[RunProcess, ...] = ()
