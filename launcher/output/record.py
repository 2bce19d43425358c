"""events.jsonl: what happened in a run, an entry a line, for those who look at it.

    attempt   an attempt begins: its plan
    turn      seconds since then; what follows until the next one happened at that moment
    event     as it came; of reports and of how busy hosts are only some
    output    more bytes are in a log: the bytes themselves are only there
    note      a line that the launcher itself printed
    finish    how the attempt ended
    end       the last line: the exit code of the whole run

The order of the entries is that in which the terminal showed them. A file of MOST_BYTES takes
neither reports nor outputs any more.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeAlias

import msgspec

from rackrun.launcher.run.events import Event, Output, Report, Usage
from rackrun.launcher.run.job import Job
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result, as_plain
from rackrun.launcher.run.state import RunState
from rackrun.run_folder import RunFolder

REPORTS_PER_SECOND = 8  # of all ranks and hosts together; a change of phase is always written
MOST_CHARACTERS = 4096  # of a text in an event
MOST_BYTES = 1 << 27

Entry: TypeAlias = dict[str, Any]


class RunRecord:
    """The file of a run; locked as long as the process lives that supervises it."""

    def __init__(self, folder: RunFolder) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.file = os.open(folder.events, flags, 0o600)
        with suppress(OSError):  # a disk without locks
            fcntl.flock(self.file, fcntl.LOCK_EX)
        self.missed = 0
        self.size = 0

    def attempt(self, job: Job, plan: Plan) -> Recorder:
        """Return a display that writes down an attempt."""
        self.write([begin(job, plan)])
        return Recorder(self, plan)

    def note(self, text: str) -> None:
        """Write a line that is printed between attempts."""
        self.write([{"note": text}])

    def end(self, code: int) -> None:
        """Write the last entry of a run."""
        self.write([{"end": code}])

    @property
    def is_full(self) -> bool:
        """Return True once only what happens rarely is still written."""
        return self.size > MOST_BYTES

    def write(self, entries: list[Entry]) -> None:
        """Append entries, all or none of them; a full disk must not end the run."""
        if self.missed:
            text = f"{self.missed} entries are missing here: there was no room for them"
            entries = [{"note": text}, *entries]
        data = b"".join(json.dumps(entry, default=str).encode() + b"\n" for entry in entries)
        self.size = size = os.fstat(self.file).st_size
        try:
            written = os.write(self.file, data)
        except OSError:
            written = 0
        if written < len(data):
            self.missed += len(entries)
            with suppress(OSError):  # half a line would spoil the next one
                os.ftruncate(self.file, size)
        else:
            self.missed = 0


class Recorder(AbstractContextManager["Recorder"]):
    """A display that writes entries, to be shown later."""

    closed = False

    def __init__(self, record: RunRecord, plan: Plan) -> None:
        self.record = record
        self.waiting: list[Entry] = []
        self.throttled: dict[tuple[str, int], ThrottledEvents] = {}
        self.every_seconds = max(1.0, (plan.world_size + len(plan.hosts)) / REPORTS_PER_SECOND)

    def __exit__(self, *reason: object) -> None:
        self._write()

    def show(self, event: Event) -> None:
        """Take an event; reports and usage wait for their turn."""
        if self.record.is_full and isinstance(event, Output | Report | Usage):
            return
        if isinstance(event, Output):
            size = len(event.data)
            self.waiting.append({"output": [event.node, event.rank, event.stream, size]})
        elif isinstance(event, Report):
            throttled = self.throttled.setdefault(("rank", event.rank), ThrottledEvents())
            # a report has only some of the fields: those that wait are merged
            fields = throttled.event.fields if isinstance(throttled.event, Report) else {}
            throttled.event = Report(event.node, event.rank, {**fields, **event.fields})
        elif isinstance(event, Usage):
            self.throttled.setdefault(("host", event.node), ThrottledEvents()).event = event
        else:
            self._take_throttled(everything=True)  # what came before this event is shown before it
            self.waiting.append(encoded(event))

    def note(self, text: str) -> None:
        """Write a line that the launcher itself printed."""
        self.waiting.append({"note": text})
        self._write()

    def draw(self, run: RunState, now: float) -> None:
        """Write down what came in this turn."""
        self._take_throttled(now=now)
        if self.waiting:
            self.waiting.insert(0, {"turn": round(now - run.started_at, 3)})
            self._write()

    def finish(self, result: Result) -> None:
        """Write how the attempt ended."""
        self._take_throttled(everything=True)
        self.waiting.append({"finish": as_plain(result)})
        self._write()

    def _take_throttled(self, now: float = 0.0, everything: bool = False) -> None:
        for throttled in self.throttled.values():
            if throttled.event is not None and (
                everything or throttled.due(now, self.every_seconds)
            ):
                self.waiting.append(encoded(throttled.event))
                throttled.let_go(now)

    def _write(self) -> None:
        if self.waiting:
            self.record.write(self.waiting)
            self.waiting = []


class ThrottledEvents:
    """The newest of the frequent events of a rank or host, and when one was last written."""

    def __init__(self) -> None:
        self.event: Report | Usage | None = None
        self.written_at = 0.0
        self.phase: object = None

    def due(self, now: float, every_seconds: float) -> bool:
        """Return True when the newest event is due: at once where it begins a phase or epoch."""
        return now - self.written_at > every_seconds or self._phase() != self.phase

    def let_go(self, now: float) -> None:
        """Take note that the event is written down."""
        self.written_at = max(now, self.written_at)
        self.phase = self._phase()
        self.event = None

    def _phase(self) -> object:
        fields = self.event.fields if isinstance(self.event, Report) else {}
        return fields.get("phase"), fields.get("epoch")


def begin(job: Job, plan: Plan) -> Entry:
    """Return the first entry of an attempt."""
    return {
        "attempt": {
            "name": job.work.name,
            "at": time.time(),
            "plan": dataclasses.asdict(plan),
        }
    }


def encoded(event: Event) -> Entry:
    """Return an event as an entry; a host's account of a failure is cut to a readable length."""
    fields = msgspec.to_builtins(event)
    cut = {name: v[:MOST_CHARACTERS] if isinstance(v, str) else v for name, v in fields.items()}
    return {"event": [type(event).__name__, cut]}
