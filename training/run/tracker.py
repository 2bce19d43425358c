"""The tracker of a run: a process that rank 0 starts, and waits for only briefly at the end."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from rackrun.commands import called
from rackrun.errors import MissingPackage
from rackrun.terminal import one_line
from training.run.stop_requests import StopRequests
from training.track.scalars import Line
from training.track.sent import END_SECONDS

STOPPED_SECONDS = 5  # for a run that is to end


class Tracker:
    """Starts `python -m training track`, and reports in one line when it fails."""

    def __init__(self, name: str, folder: Path, say: Callable[[str], None]) -> None:
        self._name = name
        self._folder = folder
        self._log = folder / f"tracker-{name}.log"
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._started()
        except OSError as error:
            self._warn(str(error.strerror))

    def _started(self) -> "subprocess.Popen[bytes]":
        command = ["-m", "training", "track", self._name, str(self._folder), "--follow"]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for the ranks; this ends as the rank does
            )

    def log(self, line: Line) -> None:
        """Look whether the process still lives; it reads the line from the file."""
        if self._process and self._process.poll() is not None:
            self._warn(self._last_words())

    def end(self, verdict: str) -> None:
        """Pass on how the run ended, and wait until all was sent, for a bounded time."""
        if not (process := self._process):
            return
        assert process.stdin
        with suppress(OSError):
            process.stdin.write(verdict.encode())
        with suppress(OSError):
            process.stdin.close()
        seconds = END_SECONDS if verdict == "finished" else STOPPED_SECONDS
        deadline = time.monotonic() + seconds
        with StopRequests(save_minutes=0) as requests:
            while process.poll() is None and time.monotonic() < deadline and not requests.ending:
                time.sleep(0.02)
        if process.poll() is None:
            process.kill()
            process.wait()
            self._warn("did not end in time")
        elif process.returncode:
            self._warn(self._last_words())

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() or ["no reason given"]
        return one_line(lines[-1]).removeprefix("error: ")[:300]

    def _warn(self, why: str) -> None:
        """Warn once that the tracker lacks something, and how to send it later."""
        if self._process and self._process.stdin:
            with suppress(OSError):
                self._process.stdin.close()
        self._process = None
        later = f"{called('track')} {self._name} {shlex.quote(str(self._folder))}"
        self._say(f"--track {self._name}: {why}; to send the rest later, type: {later}")


def check_trackers(names: list[str]) -> None:
    """Raise MissingPackage for a tracker that is not installed here."""
    for name in names:
        if find_spec(name) is None:
            raise MissingPackage(name, name)
