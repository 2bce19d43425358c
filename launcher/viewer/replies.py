"""What a run's folder and its hosts say about it: shapes that everything is checked against."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import structs

from rackrun.launcher.output.run_view import RunView
from rackrun.launcher.remote.run_processes import MOST_LISTED
from rackrun.launcher.run.result import Result, moved
from rackrun.launcher.supervision.reports import fitting_fields
from rackrun.shapes import Count, Real, Shape, Whole, at_most, between, matches
from rackrun.terminal import clean_lines, one_line

Name: TypeAlias = Annotated[str, matches(r"[!-~]{1,300}")]
Code: TypeAlias = Annotated[int, between(-128, 255)]
Seconds: TypeAlias = Annotated[float, between(0, 1e10)]
Values: TypeAlias = Annotated[dict[str, Any], at_most(64)]
"""What a rank has reported: only `fitting_fields` are kept of it."""
Pid = Annotated[int, between(0, 1 << 31)]


class Ending(Shape, frozen=True):
    """End of a run: a `Result`, as result.json has it."""

    verdict: Literal["done", "failed", "interrupted"]
    exit_code: Code
    cause: str
    host: Name | None
    rank: Whole | None
    log: str | None
    advice: str
    traceback: Annotated[str, at_most(1 << 20)]
    codes: dict[Annotated[str, matches("[0-9]{1,9}")], Whole | None]
    hosts: dict[Name, str]
    seconds: Seconds
    report: Values
    folder: Annotated[str, at_most(4096)]
    saved: Count = 0
    resume: str = ""
    attempts: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class RunFacts:
    """What the folder of a run says about it."""

    folder: str
    live: RunView | None = None
    """None before its first rank has started, and after its end."""
    alive: bool = False
    finish: Ending | None = None


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


def result_of(ending: Ending, folder: Path) -> Result:
    """Return the result of a run whose folder may have been moved."""
    source = Path(ending.folder)
    values = {each.name: getattr(ending, each.name) for each in fields(Result)}
    values |= {
        "cause": one_line(ending.cause),
        "advice": one_line(ending.advice),
        "traceback": clean_lines(ending.traceback),
        "log": None
        if ending.log is None
        else Path(str(moved(one_line(ending.log), source, folder))),
        "codes": {int(rank): code for rank, code in ending.codes.items()},
        "report": {
            name: moved(value, source, folder)
            for name, value in fitting_fields(ending.report).items()
        },
        "folder": folder,
        "resume": one_line(ending.resume),
        "attempts": (),
    }
    return Result(**values)
