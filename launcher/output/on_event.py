"""`--on-event COMMAND`: run a program of the user's when a run stalls, restarts, or ends.

The program gets the event as a JSON object on standard input, and its name in RACKRUN_EVENT.
Nothing of it is on a command line, as parts of it come from hosts. It never delays the run: events
wait for the one before, and are dropped when too many do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, TypeAlias

from rackrun.contract import variables
from rackrun.launcher.run.result import Result, as_plain
from rackrun.terminal import one_line

EventName: TypeAlias = Literal["stall", "lost", "restart", "end"]

LIMIT_SECONDS = 60.0  # for one event
_MOST_WAITING = 8
_SHOWN_BYTES = 4096  # of its output: the last line of it explains a failure
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class _Running:
    event: EventName
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    ends_at: float


class EventCommand:
    """The command of `--on-event`, and the events that it has not been run for yet."""

    def __init__(self, args: Sequence[str], limit_seconds: float = LIMIT_SECONDS) -> None:
        """Start nothing yet; without arguments, events go nowhere."""
        self._args = list(args)
        self._limit_seconds = limit_seconds
        self._waiting: deque[tuple[EventName, bytes]] = deque()
        self._running: _Running | None = None
        self._problems: list[str] = []

    def send(
        self,
        event: EventName,
        folder: Path,
        text: str,
        host: str | None = None,
        rank: int | None = None,
        result: Result | None = None,
    ) -> None:
        """Run the command for an event of the run in this folder, soon; return at once."""
        if not self._args:
            return
        content = {
            "event": event,
            "time": time.time(),
            "run": folder.name,
            "folder": str(folder),
            "text": one_line(text),
            "host": host,
            "rank": rank,
            "result": result and as_plain(result),
        }
        if len(self._waiting) == _MOST_WAITING:
            self._add_problem(event, f"dropped: {_MOST_WAITING} events wait for the command")
            return
        self._waiting.append((event, json.dumps(content, default=str).encode()))
        self._go_on()

    def problems(self) -> Iterator[str]:
        """Yield, once, why the command did not end well; start it for the next event."""
        self._go_on()
        while self._problems:
            yield self._problems.pop(0)

    def wait(self) -> None:
        """Wait until the command has been run for all events."""
        self._go_on()
        while self._running is not None:
            time.sleep(_LOOK_SECONDS)
            self._go_on()

    def abandon(self) -> None:
        """End the command, and run it for no further event."""
        self._waiting.clear()
        if self._running is not None:
            self._running.output.close()
            _end(self._running.process)
            self._running = None

    def _add_problem(self, event: EventName, what: str) -> None:
        self._problems.append(f"--on-event {self._args[0]}, {event}: {what}")

    def _go_on(self) -> None:
        if self._running is not None:
            is_late = time.monotonic() > self._running.ends_at
            if self._running.process.poll() is None and not is_late:
                return
            self._close(self._running)
            self._running = None
        while self._waiting and self._running is None:
            self._start(*self._waiting.popleft())

    def _start(self, event: EventName, content: bytes) -> None:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the command has ended
        with tempfile.TemporaryFile() as given:
            given.write(content)
            given.seek(0)
            try:
                process = subprocess.Popen(
                    self._args,
                    stdin=given,
                    stdout=output,  # a terminal may show the dashboard
                    stderr=output,
                    env={**os.environ, variables.EVENT: event},
                    start_new_session=True,  # a Ctrl-C is for the run, not for its alerts
                )
            except OSError as error:
                output.close()
                self._add_problem(event, str(error.strerror))
                return
        self._running = _Running(event, process, output, time.monotonic() + self._limit_seconds)

    def _close(self, ended: _Running) -> None:
        with ended.output as output:
            if ended.process.returncode is None:
                _end(ended.process)
                why = f"ended after {self._limit_seconds:.0f} s without a result"
                self._add_problem(ended.event, why)
            elif code := ended.process.returncode:
                output.seek(max(0, output.seek(0, os.SEEK_END) - _SHOWN_BYTES))
                lines = output.read().decode("utf-8", "replace").split("\n")
                last = next((line for line in reversed(lines) if line.strip()), "")
                what = f"exit code {code}: {one_line(last)}" if last else f"exit code {code}"
                self._add_problem(ended.event, what)


def _end(process: subprocess.Popen[bytes]) -> None:
    # it leads a session of its own, which is killed with all that the command has started
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
