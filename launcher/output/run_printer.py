"""Prints a run to a terminal, or to a file or pipe, such as the log of a scheduler's job.

A printer only reads the folder of the run, at the pace of its own reader: it may be stopped, slow
or killed without holding up the run. Lines of ranks go to standard output, the launcher's own to
standard error. A terminal that can redraw gets the dashboard below them; anything else gets a line
of progress every 15 seconds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from rackrun.contract import variables
from rackrun.launcher.output.console import NOTE, progress_words, write_all
from rackrun.launcher.output.merge import readable_lines
from rackrun.launcher.output.run_output import StartReader
from rackrun.launcher.output.run_view import read_view
from rackrun.launcher.run.job import Job
from rackrun.run_folder import RunFolder
from rackrun.units import data_size

if TYPE_CHECKING:
    from rackrun.launcher.output.dashboard import Dashboard

READ_BYTES = 1 << 18
DASHBOARD_BYTES = 1 << 18  # more than this at once is cut short above a dashboard
LOOK_SECONDS = 0.1
PROGRESS_SECONDS = 15.0  # between two lines of progress
DRAW_SECONDS = 0.5
STALL_SECONDS = 1.0  # for a reader who takes nothing, at the end of a run that has failed


class RunPrinter:
    """Prints a run to this process's standard output and error."""

    def __init__(self, folder: RunFolder, plain: bool) -> None:
        """Take the folder of a run that has begun; `plain`: no dashboard on a terminal."""
        self.folder = folder
        self.closed = False
        """Nobody reads standard output any more."""
        self.shown_bytes = 0
        self._plain = plain or not sys.stdout.isatty() or wants_lines(os.environ)
        self._read = 0
        """Bytes of output.log that have been read."""
        self._dashboard: Dashboard | None = None
        self._next_at = time.monotonic() + (PROGRESS_SECONDS if self._plain else 0.0)

    def follow(self, wait_for_end: Callable[[], bool]) -> None:
        """Print the run until its end.

        `wait_for_end` waits for a moment, and returns True once the run is over.
        """
        if self._plain:
            self._follow(wait_for_end)
            return
        from rackrun.launcher.output.dashboard import Dashboard  # rich, which imports for a while

        with Dashboard() as self._dashboard:
            self._follow(wait_for_end)

    def _follow(self, wait_for_end: Callable[[], bool]) -> None:
        while True:
            is_over = wait_for_end()  # asked first: what is written in between is read below
            for lines in self.new_lines(everything=is_over):
                self._print(lines)
            if is_over:
                return
            self._show_progress(time.monotonic())

    def new_lines(self, everything: bool = False) -> Iterator[bytes]:
        """Yield the whole lines that have come since the last time; at the end everything."""
        with suppress(FileNotFoundError), self.folder.output.open("rb") as file:
            if self._dashboard is not None:
                self._skip_to_newest(file)
            file.seek(self._read)
            while data := file.read(READ_BYTES):
                end = data.rfind(b"\n") + 1
                if not end and not (everything or len(data) == READ_BYTES):
                    return
                lines = data[: end or len(data)]
                self._read += len(lines)
                file.seek(self._read)
                yield lines

    def _skip_to_newest(self, file: BinaryIO) -> None:
        # nobody reads megabytes between two drawings, and a terminal takes seconds to show them
        size = os.fstat(file.fileno()).st_size
        if size - self._read > DASHBOARD_BYTES:
            file.seek(size - DASHBOARD_BYTES // 4)
            file.readline()
            left_out = (
                f"({data_size(file.tell() - self._read)} are left out here, see output.log)\n"
            )
            self._read = file.tell()
            self._print(left_out.encode())

    def _print(self, data: bytes) -> None:
        self.shown_bytes += len(data)
        end = "\n" if data.endswith(b"\n") else ""
        text = readable_lines(data.removesuffix(b"\n")) + end  # ranks may write into it, too
        if self._dashboard is not None:
            with suppress(OSError):  # a terminal that has hung up, of which a signal tells
                self._dashboard.show_lines(text)
        elif not (text.startswith(NOTE) or f"\n{NOTE}" in text):
            self._write(1, text)
        else:
            for line in text.splitlines(keepends=True):
                self._write(2 if line.startswith(NOTE) else 1, line)

    def _write(self, descriptor: int, text: str) -> None:
        if descriptor == 1 and self.closed:
            return
        try:
            write_all(descriptor, text.encode("utf-8", "replace"))
        except BrokenPipeError:
            self.closed = self.closed or descriptor == 1
        except OSError:  # a terminal that has hung up, of which a signal tells
            pass

    def _show_progress(self, now: float) -> None:
        if now < self._next_at:
            return
        self._next_at = now + (DRAW_SECONDS if self._dashboard else PROGRESS_SECONDS)
        run = read_view(self.folder)
        if run is None:
            return
        if self._dashboard is not None:
            with suppress(OSError):
                self._dashboard.draw(run)
        elif run.has_first_rank and (parts := list(progress_words(run))):
            self._write(2, f"{NOTE}{time.strftime('%H:%M:%S')} {', '.join(parts)}\n")


class RunPrinterThread:
    """A printer in a thread of the launcher itself, which reads the run that it supervises."""

    def __init__(self, job: Job, plain: bool) -> None:
        self._printer = RunPrinter(job.folder, plain)
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._printer.follow, args=[self._wait_for_end], daemon=True
        )
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Return True once nobody reads standard output any more."""
        return self._printer.closed

    def finish(self, patiently: bool) -> None:
        """Wait until all is shown; unless patiently, only while its reader takes something."""
        self._is_over.set()
        shown = -1
        while self._thread.is_alive() and (patiently or shown != self._printer.shown_bytes):
            shown = self._printer.shown_bytes
            self._thread.join(STALL_SECONDS)

    def _wait_for_end(self) -> bool:
        return self._is_over.wait(LOOK_SECONDS)


def printed_here(plain: bool) -> StartReader:
    """Return what prints a run to the standard output of this process, in a thread."""
    return lambda job: RunPrinterThread(job, plain)


def wants_lines(environment: Mapping[str, str]) -> bool:
    """Return True where CI, a terminal that cannot redraw, or our variable asks for lines."""
    is_ci = environment.get("CI", "").lower() in ("1", "true")
    is_asked = environment.get(variables.PLAIN, "") not in ("", "0")
    return is_ci or is_asked or environment.get("TERM", "dumb") == "dumb"
