"""What starts a run, and the controller that outlives it.

    starter, on its terminal                controller, in a session of its own
    shows the run folder      ◀── run ──    has begun a run
    Ctrl-C, TERM              ── stop ──▶   as if it had got that signal itself
    the terminal hangs up     ── leave ──▶  the run goes on
    killed              ── end of pipe ──▶  ranks save, and the run stops

With --detach the starter leaves once every rank has taken its first step. Without a terminal, as
process 1 and in a step of Slurm there is no controller: the launcher stays in its caller's tree of
processes, and ends with it. `--detach` always has one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from rackrun.commands import called
from rackrun.launcher.output.console import NOTE, say, write_all
from rackrun.launcher.output.run_output import StartReader
from rackrun.launcher.output.run_printer import LOOK_SECONDS, RunPrinter
from rackrun.launcher.output.run_view import read_view
from rackrun.launcher.run.job import Job
from rackrun.run_folder import RunFolder
from rackrun.runs import SHORT_ID
from rackrun.signals import PASSED_ON_INT, handle, ignore

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGUSR1, signal.SIGUSR2)
LEAVE, UNREAD = b"leave\n", b"unread\n"


def ends_with_starter(environment: Mapping[str, str]) -> bool:
    """Return True where a run always ends with what started it."""
    return os.getpid() == 1 or "SLURM_STEP_ID" in environment


def may_outlive_starter(environment: Mapping[str, str]) -> bool:
    """Return True where a run outlives what started it: on a person's terminal."""
    if ends_with_starter(environment):
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def run_in_controller(
    launch: Callable[[StartReader], int],
    plain: bool,
    detach: bool = False,
    detach_seconds: float | None = None,
) -> int:
    """Fork, and launch in the controller; return its exit code, 0 if it is left, or 128 + a signal.

    `detach`: leave it once every rank has taken its first step or, where seconds are given, has run
    for so long. A fork has the options, variables and secrets already. It must come before any
    thread.
    """
    orders_reader, orders_writer = os.pipe()
    news_reader, news_writer = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        os.close(orders_writer)
        os.close(news_reader)
        return launch(Controller(orders_reader, news_writer, detach).show_in_starter)
    os.close(orders_reader)
    os.close(news_writer)
    return _Starter(pid, orders_writer, news_reader, plain).wait(detach, detach_seconds)


class _Left(BaseException):
    """Raised to leave the run; its argument is the exit code of the starter."""


class _Starter:
    """The process that was typed: it shows the run, and passes on what it is asked."""

    def __init__(self, controller_pid: int, orders: int, news: int, plain: bool) -> None:
        self._controller_pid = controller_pid
        self._orders = orders
        self._news = news
        self._plain = plain
        self._is_unread = False
        """The controller knows that nobody reads standard output any more."""
        self._detached = ""
        """The run, once --detach has begun one: only the wait for its first step can be ended."""

    def wait(self, detach: bool, seconds: float | None) -> int:
        before = {**handle(PASSED_ON, self._pass_on), **handle((signal.SIGHUP,), self._leave)}
        try:
            with os.fdopen(self._news, "rb", buffering=0) as news:
                begun = news.readline()
                if begun and detach:
                    run, folder = json.loads(begun)
                    if self._wait_for_first_step(run, folder, seconds):
                        return 0
                elif begun:
                    _, folder = json.loads(begun)
                    printer = RunPrinter(RunFolder(Path(folder)), self._plain)
                    printer.follow(partial(self._wait_for_end, printer))
                news.read()  # until the controller has ended
            _, status = os.waitpid(self._controller_pid, 0)
        except _Left as left:
            return int(left.args[0])
        finally:
            # This process ends, and a Ctrl-C that comes too late for the run interrupts nothing.
            for number in before:
                signal.signal(number, ignore)
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return code
        say("the controller of the run was killed; hosts end the run on their own")
        return 128 - code

    def _wait_for_end(self, printer: RunPrinter) -> bool:
        if printer.closed and not self._is_unread:
            self._is_unread = True
            self._send(UNREAD)
        # nothing comes but the end: the controller has closed its pipe
        return bool(select.select([self._news], [], [], LOOK_SECONDS)[0])

    def _wait_for_first_step(self, run: str, folder: str, seconds: float | None) -> bool:
        """Return True once the run is on its way, and is left; False when it has ended before."""
        self._detached = run
        write_all(1, f"{run}\n".encode())
        printer = RunPrinter(RunFolder(Path(folder)), plain=True)
        running_since = float("inf")
        if seconds != 0:
            what = "taken its first step" if seconds is None else f"run for {seconds:g} s"
            say(f"waiting until every rank has {what}; Ctrl-C leaves the run running")
        while True:
            is_over = seconds != 0 and self._wait_for_end(printer)
            lines = b"".join(printer.new_lines(everything=is_over)).splitlines(keepends=True)
            write_all(2, b"".join(line for line in lines if line.startswith(NOTE.encode())))
            if is_over:
                say(f"its output: {called('logs')} {run}")
                return False
            view, now = read_view(printer.folder), time.monotonic()
            all_run = view is not None and view.all_running
            running_since = min(running_since, now) if all_run else float("inf")
            has_run = seconds is not None and now - running_since >= seconds
            if seconds == 0 or has_run or (view is not None and view.all_have_stepped):
                if seconds != 0:
                    say(f"detached; {how_to_see_and_end(run)}")
                self._send(LEAVE)
                return True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if not self._detached or number not in (signal.SIGINT, signal.SIGTERM):
            self._send(f"{number}\n".encode())
            return
        say(f"not waiting any longer; the run continues; {how_to_see_and_end(self._detached)}")
        self._leave(number, frame)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._send(LEAVE)
        if number == signal.SIGHUP:
            discard_output()
        raise _Left(128 + number)

    def _send(self, order: bytes) -> None:
        with suppress(BrokenPipeError):  # it has just ended
            os.write(self._orders, order)


class Controller:
    """This process once it supervises a run for a starter.

    Only the pipe tells it that Ctrl-C was typed or a terminal has hung up: from elsewhere, INT and
    HUP are ignored, though not by what it starts.
    """

    def __init__(self, orders: int, news: int, detach: bool) -> None:
        os.setsid()
        signal.signal(PASSED_ON_INT, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, ignore)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.close(null)
        self.closed = False
        """The starter says that nobody reads the output any more."""
        self._orders = orders
        self._news = news
        self._may_detach = detach
        self._is_detached = False
        self._main = threading.main_thread().ident or 0
        threading.Thread(target=self._obey, daemon=True).start()

    def show_in_starter(self, job: Job) -> Controller:
        """Tell the starter which run to show; with --detach, the run may now outlive it."""
        self._is_detached = self._may_detach
        begun = json.dumps([job.run_id[:SHORT_ID], str(job.folder.path)])
        with suppress(BrokenPipeError):
            os.write(self._news, f"{begun}\n".encode())
        return self

    def finish(self, patiently: bool) -> None:
        """Leave the rest to the starter, which reads until this process has ended."""

    def _obey(self) -> None:
        with os.fdopen(self._orders, "rb", buffering=0) as orders:
            while line := orders.readline():
                if line == LEAVE:
                    self.closed = False
                    discard_output()
                    return
                if line == UNREAD:
                    self.closed = True
                    continue
                number = int(line)
                signal.pthread_kill(
                    self._main, PASSED_ON_INT if number == signal.SIGINT else number
                )
        if self._is_detached:
            discard_output()
        else:
            signal.pthread_kill(self._main, signal.SIGTERM)


def discard_output() -> None:
    """Print nothing to a terminal or pipe from now on: that it has no reader ends nothing."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a file goes on to be written
            os.dup2(null, descriptor)
    os.close(null)


def how_to_see_and_end(run: str) -> str:
    """Return what to type to see a run, and to end it."""
    return f"to see it: {called('attach')} {run}; to end it: {called('stop')} {run}"
