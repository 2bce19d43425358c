"""What hosts say about runs: shapes that everything is checked against."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import structs

from rackrun.launcher.remote.run_processes import MOST_LISTED
from rackrun.shapes import Real, Shape, Whole, at_most, between, matches

Seconds: TypeAlias = Annotated[float, between(0, 1e10)]
Pid = Annotated[int, between(0, 1 << 31)]


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
    """For agents: the age of the launcher's last message; at `lease_seconds` they end."""
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
