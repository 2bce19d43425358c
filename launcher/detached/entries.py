"""Entries of a run's record, decoded: only what a controller writes is accepted.

The record lies on a host, which may have been taken over. So every entry is held against a shape
(see `record`), and what is in it against the plan of its attempt: an event
belongs to a host of the plan, and to a rank of that host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from rackrun.launcher.run import events
from rackrun.launcher.run.events import Event, Report
from rackrun.launcher.run.hosts import MOST_SLOTS
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result, moved
from rackrun.launcher.supervision.agent_protocol import FRAME_BYTES
from rackrun.launcher.supervision.reports import fitting_fields
from rackrun.run_folder import RUN_NAME
from rackrun.shapes import AtMost, Between, Matches, Misshapen, shaped
from rackrun.terminal import clean_lines, one_line

MOST_RANKS = 1 << 17
RUN_FOLDER = rf"/(?:[^\x00-\x1f\x7f]*/)?{RUN_NAME}"
"""A run folder on a host: its name is that of a run, so never `..` and never hidden."""

Folder: TypeAlias = Annotated[str, AtMost(4096), Matches(RUN_FOLDER)]
Name: TypeAlias = Annotated[str, Matches(r"[!-~]{1,300}")]
Code: TypeAlias = Annotated[int, Between(-128, 255)]
Seconds: TypeAlias = Annotated[float, Between(0, 1e10)]
Size: TypeAlias = Annotated[int, Between(0, FRAME_BYTES)]
Values: TypeAlias = Annotated[dict[str, Any], AtMost(64)]
"""What a rank has reported: only `fitting_fields` are kept of it."""


@dataclass(frozen=True)
class AttemptRecord:
    """An attempt: its plan, and where its files are on the first host."""

    name: str
    folder: Folder
    logs: tuple[str, ...]
    at: float
    plan: Plan


@dataclass(frozen=True)
class Began:
    """An attempt began, `age` seconds ago."""

    attempt: AttemptRecord
    age: Annotated[float, Between(-1e10, 1e10)]


@dataclass(frozen=True)
class Turn:
    """Time of the entries that follow, in seconds after the attempt began."""

    turn: Seconds


@dataclass(frozen=True)
class Occurred:
    """An event, by the name of its class and its fields."""

    event: tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Wrote:
    """Bytes of a log follow: node, rank, stream, size."""

    output: tuple[int, int | None, Literal["out", "err"], Size]


@dataclass(frozen=True)
class Noted:
    """A line that the launcher itself printed."""

    note: str


@dataclass(frozen=True)
class Ending:
    """End of an attempt: a `Result`, with the paths of the host."""

    verdict: Literal["done", "failed", "interrupted"]
    exit_code: Code
    cause: str
    host: Name | None
    rank: int | None
    log: str | None
    advice: str
    traceback: Annotated[str, AtMost(1 << 20)]
    codes: dict[Annotated[str, Matches("[0-9]{1,9}")], int | None]
    hosts: dict[Name, str]
    seconds: Seconds
    report: Values
    folder: Folder
    saved: events.Count = 0
    resume: str = ""
    """Never used: the machine that started the run knows the command itself."""


@dataclass(frozen=True)
class Finished:
    """An attempt ended."""

    finish: Ending


@dataclass(frozen=True)
class Ended:
    """The run ended: its exit code, and an error if no attempt could be made."""

    end: Code
    error: str = ""


@dataclass(frozen=True)
class Beat:
    """A sign of life of the host; the process id of a controller that was stopped, else 0."""

    beat: Annotated[int, Between(0, 1 << 31)]


@dataclass(frozen=True)
class Last:
    """Not of the record: no more entries come; True while the controller lives."""

    alive: bool


@dataclass(frozen=True)
class Failed:
    """Not of the record: nothing more can be read, and why."""

    why: str


Entry: TypeAlias = Began | Turn | Event | Wrote | Noted | Finished | Ended | Beat | Last | Failed

KINDS: dict[str, Any] = {
    "attempt": Began,
    "turn": Turn,
    "event": Occurred,
    "output": Wrote,
    "note": Noted,
    "finish": Finished,
    "end": Ended,
    "beat": Beat,
    "alive": Last,
}
EVENTS: dict[str, Any] = {
    kind.__name__: kind
    for kind in get_args(Event)
    if kind not in (events.Output, *get_args(events.PeerEvent))
}
"""The events that a record may have; of outputs it has the sizes.

A controller has no peers, and no host file from which it could get more hosts.
"""


class EntryReader:
    """Turns JSON into entries, and checks them against the plan that they belong to."""

    def __init__(self) -> None:
        self.plan: Plan | None = None

    def entry(self, message: Mapping[str, Any]) -> Entry:
        """Return an entry; raise Misshapen for what no controller would write."""
        kind = next(iter(message), "")  # the first key of an entry names its kind
        if kind not in KINDS:
            raise Misshapen(f"no entry of a record: {one_line(kind[:40])!r}")
        parsed = shaped(dict(message), KINDS[kind], "entry")
        if isinstance(parsed, Began):
            _check_plan(parsed.attempt.plan)
            self.plan = parsed.attempt.plan
        if isinstance(parsed, Wrote):
            self._check_origin(*parsed.output[:2])
        if isinstance(parsed, Occurred):
            return self._event(*parsed.event)
        entry: Entry = parsed
        return entry

    def _event(self, name: str, values: dict[str, Any]) -> Event:
        if name not in EVENTS:
            raise Misshapen(f"no event of a run: {one_line(name[:40])!r}")
        event: Event = shaped(values, EVENTS[name], "event")
        self._check_origin(event.node, getattr(event, "rank", None))
        if isinstance(event, Report):
            return Report(event.node, event.rank, fitting_fields(event.fields))
        return event

    def _check_origin(self, node: int, rank: int | None) -> None:
        if self.plan is None or not 0 <= node < len(self.plan.hosts):
            raise Misshapen("of a host that is not in the plan")
        first = self.plan.hosts[node].first_rank
        if rank is not None and not first <= rank < first + self.plan.hosts[node].processes:
            raise Misshapen("of a rank that is not on this host")


def _check_plan(plan: Plan) -> None:
    # Its numbers are used as indices of lists and in paths of logs: only make_plan's are valid.
    first = 0
    for node, host in enumerate(plan.hosts):
        shaped(host.name, Name, "plan.name")
        if (host.node, host.first_rank) != (node, first):
            raise Misshapen("the plan's hosts are not in their order")
        if not 0 < host.processes <= MOST_SLOTS:
            raise Misshapen(f"the plan's hosts have 1 to {MOST_SLOTS} ranks each")
        first += host.processes
    if not 0 < first == plan.world_size <= MOST_RANKS:
        raise Misshapen("the plan's ranks do not add up")


def result_of(ending: Ending, folder: Path) -> Result:
    """Return the result of an attempt, its paths turned into local ones."""
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
        "resume": "",
    }
    return Result(**values)
