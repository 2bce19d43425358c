"""What starts a run, and the controller that outlives it.

    starter, on its terminal                controller, in a session of its own
    Ctrl-C, TERM              ── stop ──▶   as if it had got that signal itself
    the terminal hangs up     ── leave ──▶  the run goes on, and nothing is printed any more
    killed              ── end of pipe ──▶  ranks save, and the run stops
    ends at once           ◀── left ──      --detach: every rank has taken its first step

Without a terminal, as process 1 and in a step of Slurm there is no controller: the launcher stays
in its caller's tree of processes, and ends with it. `--detach` always has one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType

from rackrun.commands import called
from rackrun.launcher.output.console import say
from rackrun.launcher.output.nonblocking import nobody_reads
from rackrun.signals import handle, restore

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGUSR1, signal.SIGUSR2)
LEAVE, LEFT = b"leave\n", b"left\n"


def is_bound(environment: Mapping[str, str]) -> bool:
    """Return True where a run always ends with what started it."""
    return os.getpid() == 1 or "SLURM_STEP_ID" in environment


def may_leave(environment: Mapping[str, str]) -> bool:
    """Return True where a run outlives what started it: on a person's terminal."""
    if is_bound(environment):
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def controlled(work: Callable[[Controller], int]) -> int:
    """Do `work` in a controller; return its exit code, 0 once it has left, or 128 + a signal.

    A fork has the options, variables and secrets already. It must come before any thread.
    """
    orders, starter = os.pipe()
    news, controller = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        os.close(starter)
        os.close(news)
        return work(Controller(orders, controller))
    os.close(orders)
    os.close(controller)
    return _Starter(pid, starter, news).wait()


class _Left(BaseException):
    """What started the run leaves it; its exit code."""


class _Starter:
    """The process that was typed: it passes on what it is asked, and waits."""

    def __init__(self, controller: int, orders: int, news: int) -> None:
        self._controller = controller
        self._orders = orders
        self._news = news
        self._run = ""
        """The run, once --detach has begun one: only the wait for its first step can be ended."""

    def wait(self) -> int:
        before = {**handle(PASSED_ON, self._pass_on), **handle((signal.SIGHUP,), self._leave)}
        try:
            with os.fdopen(self._news, "rb", buffering=0) as news:
                while line := news.readline():
                    if line == LEFT:
                        return 0
                    self._run = line.decode().strip()
            _, status = os.waitpid(self._controller, 0)
        except _Left as left:
            return int(left.args[0])
        finally:
            restore(before)
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return code
        say("the controller of the run was killed; hosts end the run on their own")
        return 128 - code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if not self._run or number not in (signal.SIGINT, signal.SIGTERM):
            self._send(f"{number}\n".encode())
            return
        say(f"not waited for, the run continues; {see_and_end(self._run)}")
        self._leave(number, frame)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._send(LEAVE)
        raise _Left(128 + number)

    def _send(self, order: bytes) -> None:
        with suppress(BrokenPipeError):  # it has just ended
            os.write(self._orders, order)


class Controller:
    """This process once it supervises a run for a starter."""

    def __init__(self, orders: int, news: int) -> None:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.close(null)
        self._orders = orders
        self._news = news
        self._is_detached = False
        self._main = threading.main_thread().ident or 0
        threading.Thread(target=self._obey, daemon=True).start()

    def begin_detached(self, run: str) -> None:
        """Have the starter end nothing but its wait from now on, however it ends."""
        if not self._is_detached:
            self._is_detached = True
            with suppress(BrokenPipeError):
                os.write(self._news, f"{run}\n".encode())

    def leave(self) -> None:
        """Go on without the starter, which ends with 0."""
        nobody_reads()
        with suppress(BrokenPipeError):
            os.write(self._news, LEFT)

    def _obey(self) -> None:
        with os.fdopen(self._orders, "rb", buffering=0) as orders:
            while line := orders.readline():
                if line == LEAVE:
                    nobody_reads()
                    return
                signal.pthread_kill(self._main, int(line))
        if self._is_detached:
            nobody_reads()
        else:
            signal.pthread_kill(self._main, signal.SIGTERM)


def see_and_end(run: str) -> str:
    """Return what to type to see a run, and to end it."""
    return f"to see it: {called('attach')} {run}; to end it: {called('stop')} {run}"
