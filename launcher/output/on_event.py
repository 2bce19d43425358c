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

    def __init__(self, args: Sequence[str], limit_seconds: float = LIMIT_SECONDS) -> None:
        """Take the command; without arguments, events go nowhere."""
        self._args = list(args)
        self._limit_seconds = limit_seconds
        self._threads: list[threading.Thread] = []
        self._problems = queue.SimpleQueue[str]()
        self._process: subprocess.Popen[bytes] | None = None
        self._abandoned: set[threading.Thread] = set()

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

    def wait(self, say: Callable[[str], None]) -> None:
        """Wait until the command has run for all events, at most as long as it may take for one.

        Half of that time is for the last event, if others are left.
        """
        if not self._threads:
            return
        *earlier, last = self._threads
        began, seconds = time.monotonic(), self._limit_seconds
        if any(thread.is_alive() for thread in earlier):
            self._limit_seconds = seconds / 2
        if _alive_at(began + seconds / 20, [last]):  # not for one that takes no time
            say(f"waiting up to {seconds:g} s for --on-event {self._args[0]}; Ctrl-C ends the wait")
        if late := _alive_at(began + seconds / 2, earlier):
            self.abandon(late)
            dropped = f"{plural(len(late), 'event')} before the end dropped"
            self._problems.put(f"--on-event {self._args[0]}: too slow; {dropped}")
        last.join()

    def abandon(self, threads: Sequence[threading.Thread] = ()) -> None:
        """End the command for some events, or for all: it is not run for them any more."""
        self._abandoned.update(threads or self._threads)
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

    @property
    def _is_abandoned(self) -> bool:
        return threading.current_thread() in self._abandoned

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
                return f"ended after {self._limit_seconds:g} s without a result"
            finally:
                self._process = None
            output.seek(max(0, output.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            lines = output.read().decode("utf-8", "replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        shown = f"exit code {code}: {one_line(last)}" if last else f"exit code {code}"
        return shown if code else ""


def _alive_at(moment: float, threads: Sequence[threading.Thread]) -> list[threading.Thread]:
    """Wait until threads have ended, until a moment at most; return those that have not."""
    for thread in threads:
        thread.join(max(0.0, moment - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def _end(process: subprocess.Popen[bytes]) -> None:
    # it leads a session of its own, which is killed with all that the command has started
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
