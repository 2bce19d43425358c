"""Entries of events.jsonl, decoded: only what `output/record` writes is accepted.

Ranks may write into the run folder, too. So every entry is held against a shape, and what is in it
against the plan of its attempt: an event belongs to a host of the plan, and to a rank of that host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from rackrun.launcher.run import events
from rackrun.launcher.run.events import Event, Report
from rackrun.launcher.run.hosts import MOST_SLOTS
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result, moved
from rackrun.launcher.supervision.agent_protocol import FRAME_BYTES
from rackrun.launcher.supervision.reports import fitting_fields
from rackrun.shapes import Misshapen, Shape, Whole, at_most, between, matches, shaped
from rackrun.terminal import clean_lines, one_line

MOST_RANKS = 1 << 17
Name: TypeAlias = Annotated[str, matches(r"[!-~]{1,300}")]
Code: TypeAlias = Annotated[int, between(-128, 255)]
Seconds: TypeAlias = Annotated[float, between(0, 1e10)]
Size: TypeAlias = Annotated[int, between(0, FRAME_BYTES)]
Values: TypeAlias = Annotated[dict[str, Any], at_most(64)]
"""What a rank has reported: only `fitting_fields` are kept of it."""


class AttemptRecord(Shape, frozen=True):
    """An attempt: its plan, and when it began."""

    name: str
    at: Seconds
    plan: Plan
    folder: str = ""
    """Where its entries were read."""


class Began(Shape, frozen=True):
    """An attempt began."""

    attempt: AttemptRecord


class Turn(Shape, frozen=True):
    """Time of the entries that follow, in seconds after the attempt began."""

    turn: Seconds


class Occurred(Shape, frozen=True):
    """An event, by the name of its class and its fields."""

    event: tuple[str, dict[str, Any]]


class Wrote(Shape, frozen=True):
    """Bytes of a log follow: node, rank, stream, size."""

    output: tuple[Whole, Whole | None, Literal["out", "err"], Size]


class Noted(Shape, frozen=True):
    """A line that the launcher itself printed."""

    note: str


class Ending(Shape, frozen=True):
    """End of an attempt: a `Result`, as result.json has it."""

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
    saved: events.Count = 0
    resume: str = ""
    attempts: tuple[dict[str, Any], ...] = ()


class Finished(Shape, frozen=True):
    """An attempt ended."""

    finish: Ending


class Ended(Shape, frozen=True):
    """The run ended: its exit code."""

    end: Code


Entry: TypeAlias = Began | Turn | Event | Wrote | Noted | Finished | Ended

KINDS: dict[str, Any] = {
    "attempt": Began,
    "turn": Turn,
    "event": Occurred,
    "output": Wrote,
    "note": Noted,
    "finish": Finished,
    "end": Ended,
}
EVENTS: dict[str, Any] = {
    kind.__name__: kind
    for kind in get_args(Event)
    if kind not in (events.Output, *get_args(events.PeerEvent))
}
"""The events that entries have; of outputs they have the sizes. Peers have files of their own."""


class EntryReader:
    """Turns JSON into entries, and checks them against the plan that they belong to."""

    def __init__(self) -> None:
        self.plan: Plan | None = None

    def entry(self, message: Mapping[str, Any]) -> Entry:
        """Return an entry; raise Misshapen for what is none."""
        kind = next(iter(message), "")  # the first key of an entry names its kind
        if kind not in KINDS:
            raise Misshapen(f"no entry of a run: {one_line(kind[:40])!r}")
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
    """Return the result of an attempt whose folder may have been moved."""
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
