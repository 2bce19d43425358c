"""`--on-event COMMAND`: run a program of the user's when a run stalls, restarts, or ends.

The program gets the event as a JSON object on standard input, and its name in RACKRUN_EVENT.
Nothing of it is on a command line, as parts of it come from hosts. It never delays the run: a
thread runs it for one event after the other.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

from rackrun.contract import variables
from rackrun.launcher.run.result import Result, as_plain
from rackrun.terminal import one_line
from rackrun.units import plural

EventName: TypeAlias = Literal["stall", "lost", "restart", "end"]

LIMIT_SECONDS = 60.0  # for one event; and once the run has ended, for all that are left
_SHOWN_BYTES = 4096  # of its output: the last line of it explains a failure


class EventCommand:
    """The command of `--on-event`, which runs for one event after the other."""

    def __init__(
        self, args: Sequence[str], folder: Path, limit_seconds: float = LIMIT_SECONDS
    ) -> None:
        """Take the command, and the folder of the run; without arguments, events go nowhere."""
        self._args = list(args)
        self._folder = folder
        self._limit_seconds = limit_seconds
        self._events = queue.SimpleQueue[tuple[EventName, bytes] | None]()
        """Those that the command has not run for yet; None after the last one."""
        self._problems = queue.SimpleQueue[str]()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run_for_all, daemon=True)
        if self._args:
            self._thread.start()

    def send(
        self,
        event: EventName,
        text: str,
        host: str | None = None,
        rank: int | None = None,
        result: Result | None = None,
    ) -> None:
        """Run the command for an event of the run, soon; return at once."""
        if not self._args:
            return
        content = {
            "event": event,
            "time": time.time(),
            "run": self._folder.name,
            "folder": str(self._folder),
            "text": one_line(text),
            "host": host,
            "rank": rank,
            "result": result and as_plain(result),
        }
        self._events.put((event, json.dumps(content, default=str).encode()))

    def problems(self) -> Iterator[str]:
        """Yield, once, why the command did not end well."""
        while not self._problems.empty():
            yield self._problems.get()

    def wait(self, say: Callable[[str], None]) -> None:
        """Wait until the command has run for all events, at most as long as it may take for one."""
        if not self._args:
            return
        self._events.put(None)
        seconds = self._limit_seconds
        self._thread.join(seconds / 20)
        if self._thread.is_alive():  # most commands take no time
            say(f"waiting up to {seconds:g} s for --on-event {self._args[0]}; Ctrl-C ends the wait")
            self._thread.join(seconds)
        if self._thread.is_alive():
            dropped = plural(self._events.qsize(), "event")  # the present one in place of the None
            self._problems.put(f"--on-event {self._args[0]}: too slow; {dropped} dropped")
            self.abandon()

    def abandon(self) -> None:
        """End the command; it is not run any more."""
        self._is_abandoned = True
        if (process := self._process) is not None:
            _end(process)

    def _run_for_all(self) -> None:
        while (next_event := self._events.get()) and not self._is_abandoned:
            event, content = next_event
            problem = self._run(event, content)
            if problem and not self._is_abandoned:
                self._problems.put(f"--on-event {self._args[0]}, {event}: {problem}")

    def _run(self, event: EventName, content: bytes) -> str:
        """Run the command for an event; return what went wrong, "" if nothing did."""
        # not pipes: what the command starts in the background may keep them open
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
            stdin.write(content)
            stdin.seek(0)
            try:
                self._process = process = subprocess.Popen(
                    self._args,
                    stdin=stdin,
                    stdout=output,  # a terminal may show the dashboard
                    stderr=output,
                    env={**os.environ, variables.EVENT: event},
                    start_new_session=True,  # a Ctrl-C is for the run, not for its alerts
                )
            except OSError as error:
                return str(error.strerror)
            if self._is_abandoned:
                _end(process)
            try:
                code = process.wait(self._limit_seconds)
            except subprocess.TimeoutExpired:
                _end(process)
                return f"ended after {self._limit_seconds:g} s without a result"
            finally:
                self._process = None
            output.seek(max(0, output.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            lines = output.read().decode("utf-8", "replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        shown = f"exit code {code}: {one_line(last)}" if last else f"exit code {code}"
        return shown if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    # it leads a session of its own, which is killed with all that the command has started
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
