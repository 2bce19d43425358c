"""Shows a run on a terminal, or in a file or pipe, as its folder has it.

A screen only reads the folder of the run, at the pace of whoever looks: it may be stopped, slow or
killed, and holds up no run. Lines of ranks go to standard output, the launcher's own to standard
error; a terminal that can redraw gets the dashboard below them.
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
from rackrun.launcher.output.run_output import Show
from rackrun.launcher.output.run_view import read_view
from rackrun.launcher.run.job import Job
from rackrun.run_folder import RunFolder
from rackrun.units import data_size

if TYPE_CHECKING:
    from rackrun.launcher.output.dashboard import Dashboard

READ_BYTES = 1 << 18
BOARD_BYTES = 1 << 18  # more than this at once is cut short above a dashboard
LOOK_SECONDS = 0.1
PROGRESS_SECONDS = 15.0  # between two lines of progress
DRAW_SECONDS = 0.5
STALL_SECONDS = 1.0  # for a reader who takes nothing, at the end of a run that has failed


class Screen:
    """A run on this process's standard output and error."""

    def __init__(self, folder: RunFolder, plain: bool) -> None:
        """Take the folder of a run that has begun; `plain`: no dashboard on a terminal."""
        self.folder = folder
        self.closed = False
        """Nobody reads standard output any more."""
        self.shown_bytes = 0
        self._plain = plain or not sys.stdout.isatty() or wants_lines(os.environ)
        self._read = 0
        """Bytes of output.log that have been read."""
        self._board: Dashboard | None = None
        self._next_at = time.monotonic() + (PROGRESS_SECONDS if self._plain else 0.0)

    def follow(self, pause: Callable[[], bool]) -> None:
        """Show the run until its end; `pause` waits a moment, and is True once the run is over."""
        if self._plain:
            self._follow(pause)
            return
        from rackrun.launcher.output.dashboard import Dashboard  # rich, which imports for a while

        with Dashboard() as self._board:
            self._follow(pause)

    def _follow(self, pause: Callable[[], bool]) -> None:
        while True:
            is_over = pause()  # asked first: what is written in between is read below
            for lines in self.new_lines(everything=is_over):
                self._show(lines)
            if is_over:
                return
            self._draw(time.monotonic())

    def new_lines(self, everything: bool = False) -> Iterator[bytes]:
        """Yield the whole lines that have come since the last time; at the end everything."""
        with suppress(FileNotFoundError), self.folder.output.open("rb") as file:
            if self._board is not None:
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
        if size - self._read > BOARD_BYTES:
            file.seek(size - BOARD_BYTES // 4)
            file.readline()
            left_out = (
                f"({data_size(file.tell() - self._read)} are left out here, see output.log)\n"
            )
            self._read = file.tell()
            self._show(left_out.encode())

    def _show(self, data: bytes) -> None:
        self.shown_bytes += len(data)
        end = "\n" if data.endswith(b"\n") else ""
        text = readable_lines(data.removesuffix(b"\n")) + end  # ranks may write into it, too
        if self._board is not None:
            with suppress(OSError):  # a terminal that has hung up, of which a signal tells
                self._board.show_lines(text)
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

    def _draw(self, now: float) -> None:
        if now < self._next_at:
            return
        self._next_at = now + (DRAW_SECONDS if self._board else PROGRESS_SECONDS)
        run = read_view(self.folder)
        if run is None:
            return
        if self._board is not None:
            with suppress(OSError):
                self._board.draw(run)
        elif run.has_first_rank and (parts := list(progress_words(run))):
            self._write(2, f"{NOTE}{time.strftime('%H:%M:%S')} {', '.join(parts)}\n")


class ScreenThread:
    """A screen in a thread of the launcher itself, which reads the run that it supervises."""

    def __init__(self, job: Job, plain: bool) -> None:
        self._screen = Screen(job.folder, plain)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._screen.follow, args=[self._pause], daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Return True once nobody reads standard output any more."""
        return self._screen.closed

    def finish(self, patiently: bool) -> None:
        """Wait until all is shown; unless patiently, only while its reader takes something."""
        self._is_over.set()
        shown = -1
        while self._thread.is_alive() and (patiently or shown != self._screen.shown_bytes):
            shown = self._screen.shown_bytes
            self._thread.join(STALL_SECONDS)

    def _pause(self) -> bool:
        return self._is_over.wait(LOOK_SECONDS)


def shown_here(plain: bool) -> Show:
    """Return what shows a run on the terminal of this process."""
    return lambda job: ScreenThread(job, plain)


def wants_lines(environment: Mapping[str, str]) -> bool:
    """Return True where CI, a terminal that cannot redraw, or our variable asks for lines."""
    is_ci = environment.get("CI", "").lower() in ("1", "true")
    is_asked = environment.get(variables.PLAIN, "") not in ("", "0")
    return is_ci or is_asked or environment.get("TERM", "dumb") == "dumb"
