"""`--on-event COMMAND`: run a program of the user's when a run stalls, restarts, or ends.

The program gets the event as a JSON object on standard input, and its name in RACKRUN_EVENT.
Nothing of it is on a command line, as parts of it come from hosts. It never delays the run: each
event has a thread, which waits for the one before.
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

from rackrun.contract import variables
from rackrun.launcher.run.result import Result, as_plain
from rackrun.terminal import one_line

EventName: TypeAlias = Literal["stall", "lost", "restart", "end"]

LIMIT_SECONDS = 60.0  # for one event
_SHOWN_BYTES = 4096  # of its output: the last line of it explains a failure


class EventCommand:
    """The command of `--on-event`, which runs for one event after the other."""

    def __init__(self, args: Sequence[str], limit_seconds: float = LIMIT_SECONDS) -> None:
        """Take the command; without arguments, events go nowhere."""
        self._args = list(args)
        self._limit_seconds = limit_seconds
        self._threads: list[threading.Thread] = []
        self._problems = queue.SimpleQueue[str]()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_abandoned = False

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
        args = (self._threads[-1:], event, json.dumps(content, default=str).encode())
        thread = threading.Thread(target=self._run_after, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def problems(self) -> Iterator[str]:
        """Yield, once, why the command did not end well."""
        while not self._problems.empty():
            yield self._problems.get()

    def wait(self) -> None:
        """Wait until the command has been run for all events."""
        for thread in self._threads:
            thread.join()

    def abandon(self) -> None:
        """End the command, and run it for no further event."""
        self._is_abandoned = True
        if self._process is not None:
            _end(self._process)

    def _run_after(
        self, before: Sequence[threading.Thread], event: EventName, content: bytes
    ) -> None:
        for thread in before:
            thread.join()
        problem = "" if self._is_abandoned else self._run(event, content)
        if problem and not self._is_abandoned:
            self._problems.put(f"--on-event {self._args[0]}, {event}: {problem}")

    def _run(self, event: EventName, content: bytes) -> str:
        """Run the command for an event; return what went wrong, "" if nothing did."""
        # not pipes: what the command starts in the background may keep them open
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
            given.write(content)
            given.seek(0)
            try:
                self._process = process = subprocess.Popen(
                    self._args,
                    stdin=given,
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
                return f"ended after {self._limit_seconds:.0f} s without a result"
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
