"""events.jsonl: what happened in a run, a JSON object a line, for programs and for later.

Each has `time` and `event`: attempt, started, phase, ended, lost, closed, finish, restart, end. Its
lock is held as long as a process supervises the run.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from rackrun.atomic import append_whole
from rackrun.launcher.run.events import Closed, Event, Lost, RankEnded, RankStarted, Report, Swept
from rackrun.launcher.run.plan import Plan
from rackrun.shapes import Misshapen, Real, Shape, between, parsed
from rackrun.terminal import one_line

MOST_BYTES = 1 << 24
LAST_BYTES = 200  # more than the line of the end has
MOST_CHARACTERS = 4096  # of a text from a host


class EndLine(Shape, frozen=True):
    """The last line."""

    time: Real
    event: Literal["end"]
    exit_code: Annotated[int, between(-128, 255)]


class EventLog:
    """The file of a run, through all its attempts."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with suppress(OSError):  # a disk without locks
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._phase: tuple[object, ...] = ()
        """The last phase that the first rank reported."""

    def close(self) -> None:
        """Close the file, and so unlock it."""
        os.close(self._file)

    def begin(self, number: int, plan: Plan) -> None:
        """Write that an attempt begins."""
        self._plan, self._phase = plan, ()
        hosts = [host.name for host in plan.hosts]
        self.write("attempt", number=number, run_id=plan.run_id, hosts=hosts)

    def add(self, event: Event) -> None:
        """Write an event of a host or rank, unless it is only one of many."""
        match event:
            case RankStarted():
                self.write("started", rank=event.rank, host=self._plan.host(event.node).name)
            case RankEnded():
                host = self._plan.host(event.node).name
                self.write("ended", rank=event.rank, host=host, exit_code=event.exit_code)
            case Lost():
                reason = one_line(event.reason[:MOST_CHARACTERS])
                self.write("lost", host=self._plan.host(event.node).name, reason=reason)
            case Closed() | Swept():
                left = len(event.survivors)
                self.write("closed", host=self._plan.host(event.node).name, left=left)
            case Report() if event.rank == self._plan.hosts[0].first_rank:
                phase = (event.fields.get("phase"), event.fields.get("epoch"))
                if phase != self._phase:
                    self._phase = phase
                    self.write("phase", phase=phase[0], epoch=phase[1])

    def write(self, event: str, **values: object) -> None:
        """Append a line, if there is room; the last one, `end`, also to a file at its limit."""
        if event == "end" or os.fstat(self._file).st_size <= MOST_BYTES:
            line = json.dumps({"time": round(time.time(), 3), "event": event, **values})
            append_whole(self._file, f"{line}\n".encode())


def exit_code_in(path: Path) -> int | None:
    """Return the exit code of a run that has ended, from the last line of its events."""
    with suppress(OSError, Misshapen), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        return parsed(file.read().rstrip(b"\n").rpartition(b"\n")[2], EndLine, LAST_BYTES).exit_code
    return None
